"""Checkpoints: the whole state of a run in one file, written so that a kill at any instant loses nothing.

`checkpoint_step{N}.pt` is written to a temporary name, synced and renamed; its manifest with the sha256 comes last, and
only a file that matches its manifest is ever loaded.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any

import torch

from tamis.config import Config, ConfigError
from tamis.run import checkpoints
from tamis.run.directory import RunDirectory
from tamis.run.records import write_atomic

MUST_MATCH = ("model", "nsa")  # sections that decide what the weights mean


class _Hashing:
    """A file that knows the sha256 of what was written to it, so that saving needs no second read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save_checkpoint(run: RunDirectory, state: dict[str, Any], config: Config) -> Path:
    """Write the state of `state["step"]` and its manifest, then remove the oldest beyond `keep_checkpoints`."""
    path = run.checkpoint(state["step"])
    digests: list[str] = []

    def write(file: IO[bytes]) -> None:
        hashing = _Hashing(file)
        torch.save(state, hashing)  # type: ignore[arg-type]
        digests.append(hashing.digest.hexdigest())

    run.manifest(state["step"]).unlink(missing_ok=True)  # a manifest never speaks for another file's bytes
    write_atomic(path, write)
    checkpoints.write_manifest(run, state["step"], config_hash=config.hash, sha256=digests[0])
    checkpoints.retire(run, config.train.keep_checkpoints)
    return path


def load_checkpoint(path: Path, config: Config, device: torch.device) -> dict[str, Any]:
    """The verified state in `path`; an error names what is wrong with the file or which key differs."""
    checkpoints.require_valid(path)
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    _require_same_model(path, state["config"], config)
    return state


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
