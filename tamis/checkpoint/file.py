"""Checkpoints: the whole state of a run, written so that a kill at any instant loses nothing.

`checkpoint_step{N}.pt` is written to a temporary name, synced and renamed. Its manifest with the sha256 is written
last, and only a checkpoint that matches its manifest is loaded. It is one file, or with sharded parameters a folder
(`sharded.py`). Both hold: step, config, model, optimizer, scaler, data position, rng, world_size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from tamis.config import Config, ConfigError
from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_atomic

MUST_MATCH = ("model", "nsa")  # sections that decide what the weights mean

State = dict[str, Any]


class _Hashing:
    """A file that computes the sha256 of what is written to it, so that saving needs no second read.

    torch.save replaces an error of the file, such as a full disk, with its own; `error` keeps the cause.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_checkpoint(
    run: RunDirectory, state: State, config: Config, sharded: bool, is_main: bool, together: Callable[..., None]
) -> Path:
    """Write the state of `state["step"]`, then remove the oldest checkpoints beyond `keep_checkpoints`.

    All ranks call it; `together(action)` runs an action on every rank and raises one rank's error on all. An OSError
    from the disk leaves every earlier checkpoint as it was.
    """
    if sharded:
        from tamis.checkpoint.sharded import save_shards

        save_shards(run, state, config, is_main, together)
    elif is_main:
        save_file(run, state, config)
    if is_main:
        checkpoints.retire(run, config.train.keep_checkpoints)
    return run.checkpoint(state["step"])


def save_file(run: RunDirectory, state: State, config: Config) -> Path:
    run.require_held()
    path = run.checkpoint(state["step"])
    digests: list[str] = []

    def write(file: IO[bytes]) -> None:
        hashing = _Hashing(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]
        except RuntimeError:
            raise hashing.error or RuntimeError("torch.save failed") from None
        digests.append(hashing.digest.hexdigest())

    run.manifest(state["step"]).unlink(missing_ok=True)  # the old manifest must never describe the new bytes
    write_atomic(path, write)
    checkpoints.write_manifest(run, state["step"], config_hash=config.hash, sha256=digests[0])
    return path


def read_checkpoint(path: Path, device: torch.device) -> State:
    """Verify the checkpoint `path`, file or folder, and return its state with whole tensors."""
    checkpoints.require_valid(path)
    if not path.is_dir():
        return dict(torch.load(path, map_location=device, weights_only=True))
    from tamis.checkpoint.sharded import read_facts, read_whole

    return read_facts(path) | read_whole(path, device)


def verify_loading(path: Path, config: Config) -> None:
    """Load a checkpoint on the CPU as a resume would; raises what the resume would raise."""
    load_checkpoint(path, config, torch.device("cpu"))


def load_checkpoint(path: Path, config: Config, device: torch.device, sharded: State | None = None) -> State:
    """Return the state to resume `config` from; an error names what is wrong with the file or which key differs.

    Tensors are whole, on `device`; with `sharded`, a sharded model and optimizer, they are sharded as those are.
    """
    if sharded is None or not path.is_dir():
        state = read_checkpoint(path, device)
        _require_same_model(path, state["config"], config)
        return state if sharded is None else _divided(state, sharded)
    from tamis.checkpoint.sharded import read_facts, read_into

    checkpoints.require_valid(path)
    facts = read_facts(path)
    _require_same_model(path, facts["config"], config)
    return facts | read_into(path, sharded)


def _divided(state: State, sharded: State) -> State:
    from tamis.checkpoint.sharded import shard_like

    parameters = sharded["model"]
    model = {name: shard_like(parameters[name], tensor) for name, tensor in state["model"].items()}
    optimizer = {
        name: {key: shard_like(parameters[name], tensor) for key, tensor in moments.items()}
        for name, moments in state["optimizer"].items()
    }
    return {**state, "model": model, "optimizer": optimizer}


def _require_same_model(path: Path, saved: dict[str, Any], config: Config) -> None:
    current = config.model_dump()
    for section in MUST_MATCH:
        for key, value in current[section].items():
            if key != "name" and saved[section].get(key) != value:
                raise ConfigError(
                    f"{path} holds a model with {section}.{key}={saved[section].get(key)}, but the configuration says "
                    f"{value}: resume with the configuration it was trained with, or choose another train.out_dir"
                )
    if saved["data"]["tokenizer"] != config.data.tokenizer:
        raise ConfigError(f"{path} was trained on {saved['data']['tokenizer']} tokens: set data.tokenizer to that")
