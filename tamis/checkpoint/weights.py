"""Weights alone, from whatever holds them: a checkpoint, a run directory, an exported folder or a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tamis.checkpoint.file import read_checkpoint
from tamis.config import ConfigError
from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory

EXPORTED_WEIGHTS, EXPORTED_CONFIG, EXPORTED_TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
Found = tuple[Path, dict[str, Tensor], dict[str, Any], int]  # source, weights, configuration as a tree, step


def read_weights(path: Path) -> Found:
    """Return the weights in a checkpoint, a run (its newest valid checkpoint), an exported folder or a weights file."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a checkpoint, a run directory, an exported folder or weights")
    if path.is_dir() and (path / EXPORTED_WEIGHTS).exists():
        return _read_export(path)
    if path.suffix == ".safetensors":
        return _read_plain_weights(path)
    if path.is_dir() and path.suffix != ".pt":  # a sharded checkpoint is a folder named like the file
        step = checkpoints.latest_valid_checkpoint(path)
        if step is None:
            raise ValueError(f"{path} holds no valid checkpoint and no {EXPORTED_WEIGHTS}")
        path = RunDirectory(path).checkpoint(step)
    return _read_checkpoint(path)


def _read_checkpoint(path: Path) -> Found:
    checkpoints.require_valid(path)
    try:
        if path.is_dir():
            state = read_checkpoint(path, torch.device("cpu"))
        else:  # memory-mapped: the optimizer's state is never read
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return path, dict(state["model"]), dict(state["config"]), int(state["step"])
    except Exception as error:  # torch.load raises anything on a foreign file; the message quotes it
        raise ValueError(f"{path} is not a checkpoint of this trainer: {error!r}") from None


def _read_plain_weights(path: Path) -> Found:
    """Read plain weights, as `tamis convert` writes them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        return path, weights, json.loads(about["tamis_config"]), int(about["tamis_step"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a file that `tamis convert` wrote: {error!r}") from None


def _read_export(folder: Path) -> Found:
    from safetensors.torch import load_file

    try:
        described = json.loads((folder / EXPORTED_CONFIG).read_text(encoding="utf-8"))
        weights = {name.removeprefix("decoder."): t for name, t in load_file(folder / EXPORTED_WEIGHTS).items()}
        return folder, weights, described["tamis"], int(described["tamis_step"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is not a folder that `tamis export` wrote: {error!r}") from None


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: Path, remedy: str) -> None:
    """Copy weights into a model; a ConfigError names the first tensor that does not fit."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected != found:
        differing = sorted(name for name in {**expected, **found} if expected.get(name) != found.get(name))
        name = differing[0]
        raise ConfigError(
            f"the weights in {source} do not fit this model: {name} has shape {found.get(name)}, expected "
            f"{expected.get(name)} ({len(differing)} tensors differ): {remedy}"
        )
    model.load_state_dict(weights)
