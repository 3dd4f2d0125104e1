"""Convert a checkpoint to the other kind, or to plain safetensors weights.

One process or DDP writes a `file`, FSDP writes a `folder`; both resume under both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tamis.checkpoint.file import State, read_checkpoint, save_file
from tamis.config import build_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_atomic

Kind = Literal["file", "folder", "safetensors"]


def convert_checkpoint(
    source: str | Path, target: str | Path, kind: Kind, redact: Callable[[str], str] | None = None
) -> Path:
    """Write the verified checkpoint `source` as another `kind` to `target`, which must not exist; returns its path.

    A checkpoint keeps its name, `checkpoint_step{N}.pt`, and gets a manifest, so that a run can resume from it.
    `redact` is applied to every text of the configuration inside.
    """
    source, target = Path(source), Path(target)
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}: it must be one of {', '.join(get_args(Kind))}")
    state = read_checkpoint(source, torch.device("cpu"))
    if redact is not None:
        state["config"] = _redacted(state["config"], redact)
    if target.exists():
        raise ValueError(f"{target} is there already: choose another target")
    if kind == "safetensors":
        return _write_weights(state, target)
    run = RunDirectory(target.parent)
    if target.name != run.checkpoint(state["step"]).name:
        raise ValueError(f"a checkpoint of step {state['step']} must be named {run.checkpoint(state['step']).name}")
    config = build_config(state["config"])
    run.create()
    if kind == "file":
        return save_file(run, state, config)
    from tamis.checkpoint.sharded import save_shards

    return save_shards(run, state, config, is_main=True, together=lambda action: action())


def _redacted(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, redact) for item in value]
    return redact(value) if isinstance(value, str) else value


def _write_weights(state: State, target: Path) -> Path:
    """Write the fp32 weights by name, with configuration and step in the file's metadata."""
    from safetensors.torch import save

    about = {"tamis_config": json.dumps(state["config"]), "tamis_step": str(state["step"])}
    weights = {name: tensor.contiguous() for name, tensor in state["model"].items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, lambda file: file.write(save(weights, metadata=about)))
    return target
