"""Sharded checkpoints: a folder to which each rank writes its own shards, through torch.distributed.checkpoint.

`checkpoint_step{N}.pt/` holds safetensors files and `facts.json`, nothing pickled. It loads on any number of ranks,
and into a model that is not sharded.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from tamis.config import Config
from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import sync_directory, write_json_atomic

FACTS = "facts.json"
TENSORS = ("model", "optimizer", "rng")  # the rest of a state is facts, which JSON can hold

State = dict[str, Any]


def save_shards(run: RunDirectory, state: State, config: Config, is_main: bool, together: Callable[..., None]) -> Path:
    """Write a checkpoint folder; all ranks call it. An OSError on one rank is raised on all, and nothing is lost."""
    step = state["step"]
    path = run.checkpoint(step)
    temporary = path.with_name(f"{path.name}.tmp")

    def prepare() -> None:
        if is_main:
            run.require_held()
            run.manifest(step).unlink(missing_ok=True)  # the old manifest must never describe the new bytes
            checkpoints.remove(temporary)
            temporary.mkdir()

    def publish() -> None:
        if is_main:
            run.require_held()
            write_json_atomic(temporary / FACTS, {name: state[name] for name in state if name not in TENSORS})
            checkpoints.remove(path)
            os.replace(temporary, path)
            sync_directory(path.parent)
            checkpoints.write_manifest(run, step, config_hash=config.hash)

    try:
        together(prepare)
        _write(temporary, flatten(state))
        together(publish)
    except OSError:
        if is_main:
            checkpoints.remove(temporary)
        raise
    return path


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:  # raised on every rank
        reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise OSError(f"the shards could not be written: {reasons}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's warning about working without a process group, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_facts(path: Path) -> State:
    return dict(json.loads((path / FACTS).read_text(encoding="utf-8")))


def read_whole(path: Path, device: torch.device) -> State:
    """Read every tensor whole; each process reads for itself."""
    reader = dcp.HuggingFaceStorageReader(str(path))
    found = cast(dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata)
    tensors = {name: torch.empty(kept.size, dtype=kept.properties.dtype, device=device) for name, kept in found.items()}
    with _quiet():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return unflatten(tensors)


def read_into(path: Path, sharded: State) -> State:
    """Read this rank's part into the tensors of `sharded`. No rank waits for another."""
    reader = dcp.HuggingFaceStorageReader(str(path))
    found = reader.read_metadata().state_dict_metadata  # a parameter that no gradient ever reached has no moments
    tensors = {name: tensor for name, tensor in flatten(sharded).items() if name in found}
    with _quiet():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return unflatten(tensors)


def shard_like(parameter: Tensor | None, value: Tensor) -> Tensor:
    """Return `value`, whole on every rank, sharded as `parameter` is."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    placed = value.to(parameter.device)
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)


def flatten(state: State) -> dict[str, Tensor]:
    """Return the tensors under flat names: `model.NAME`, `optimizer.NAME.KEY`, `rng`."""
    model = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    moments = {
        f"optimizer.{name}.{key}": tensor
        for name, of_parameter in state["optimizer"].items()
        for key, tensor in of_parameter.items()
    }
    return {**model, **moments, "rng": state["rng"]}


def unflatten(tensors: dict[str, Tensor]) -> State:
    model: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        section, _, rest = name.partition(".")
        if section == "model":
            model[rest] = tensor
        elif section == "optimizer":
            parameter, _, key = rest.rpartition(".")
            optimizer.setdefault(parameter, {})[key] = tensor
    return {"model": model, "optimizer": optimizer, "rng": tensors["rng"]}
