"""Checkpoints: the whole state of a run, written so that a kill at any instant loses nothing.

`checkpoint_step{N}.pt` is written to a temporary name, synced and renamed; its manifest with the sha256 comes last, and
only what matches its manifest is ever loaded. It is one file, or with sharded parameters a folder
(`sharded_checkpoint.py`). Both hold the same: step, config, model, optimizer, scaler, data position, rng, world_size.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any

import torch

from tamis.config import Config, ConfigError
from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_atomic
from tamis.train.distributed import Workers, is_sharded

MUST_MATCH = ("model", "nsa")  # sections that decide what the weights mean

State = dict[str, Any]


class _Hashing:
    """A file that knows the sha256 of what was written to it, so that saving needs no second read.

    PyTorch's writer turns an error of the file, such as a full disk, into one of its own; the cause is kept here.
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


def save_checkpoint(run: RunDirectory, state: State, config: Config, workers: Workers) -> Path:
    """Write the state of `state["step"]`, then remove the oldest checkpoints beyond `keep_checkpoints`.

    All ranks call it. An OSError, where the disk failed, leaves every earlier checkpoint as it was.
    """
    if is_sharded(config, workers):
        from tamis.checkpoint.sharded import save_shards

        save_shards(run, state, config, workers)
    elif workers.is_main:
        save_file(run, state, config)
    if workers.is_main:
        checkpoints.retire(run, config.train.keep_checkpoints)
    return run.checkpoint(state["step"])


def save_file(run: RunDirectory, state: State, config: Config) -> Path:
    path = run.checkpoint(state["step"])
    digests: list[str] = []

    def write(file: IO[bytes]) -> None:
        hashing = _Hashing(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]
        except RuntimeError:
            raise hashing.error or RuntimeError("torch.save failed") from None
        digests.append(hashing.digest.hexdigest())

    run.manifest(state["step"]).unlink(missing_ok=True)  # a manifest never speaks for another file's bytes
    write_atomic(path, write)
    checkpoints.write_manifest(run, state["step"], config_hash=config.hash, sha256=digests[0])
    return path


def read_checkpoint(path: Path, device: torch.device) -> State:
    """The verified state in `path`, file or folder, every tensor whole."""
    checkpoints.require_valid(path)
    if not path.is_dir():
        return dict(torch.load(path, map_location=device, weights_only=True))
    from tamis.checkpoint.sharded import read_facts, read_whole

    return read_facts(path) | read_whole(path, device)


def load_checkpoint(path: Path, config: Config, device: torch.device, sharded: State | None = None) -> State:
    """The state to resume `config` from; an error names what is wrong with the file or which key differs.

    Tensors come whole, on `device`; or where `sharded` gives the tensors of a sharded model and optimizer, in those.
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
    from tamis.train.fsdp import like

    parameters = sharded["model"]
    model = {name: like(parameters[name], tensor) for name, tensor in state["model"].items()}
    optimizer = {
        name: {key: like(parameters[name], tensor) for key, tensor in moments.items()}
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
