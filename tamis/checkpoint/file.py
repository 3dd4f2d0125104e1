"""Checkpoints: the whole state of a run, written so that a kill at any instant loses nothing.

`checkpoint_step{N}.pt` is written to a temporary name, synced and renamed. Its manifest with the sha256 is written
last, and only a checkpoint that matches its manifest is loaded. It is one file, or with sharded parameters a folder
(`sharded.py`). Both hold: step, config, model, optimizer, scaler, data position, rng, world_size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tamis.config import Config, ConfigError
from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory
from tamis.run.files.identity import config_changes
from tamis.run.files.manifest import DamagedCheckpoint
from tamis.run.files.records import write_atomic

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW, per parameter
MUON_MOMENTS = {"momentum_buffer"}

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
        require_same_model(path, state["config"], config)
        return state if sharded is None else _divided(state, sharded)
    from tamis.checkpoint.sharded import read_facts, read_into

    checkpoints.require_valid(path)
    facts = read_facts(path)
    require_same_model(path, facts["config"], config)
    return facts | read_into(path, sharded)


def _divided(state: State, sharded: State) -> State:
    from tamis.checkpoint.sharded import shard_like

    parameters = sharded["model"]
    model = {name: shard_like(parameters.get(name), tensor) for name, tensor in state["model"].items()}
    optimizer = {
        name: {key: shard_like(parameters.get(name), tensor) for key, tensor in moments.items()}
        for name, moments in state["optimizer"].items()
    }
    return {**state, "model": model, "optimizer": optimizer}


def saved_config(path: Path) -> dict[str, Any] | None:
    """Return the configuration in a checkpoint without reading its tensors; None if it cannot be read."""
    try:
        if not path.is_dir():
            return dict(torch.load(path, mmap=True, weights_only=True)["config"])
        from tamis.checkpoint.sharded import read_facts  # here: it loads torch.distributed.checkpoint, in 0.3 s

        return dict(read_facts(path)["config"])
    except Exception:  # torch.load has no common error; `read_checkpoint` verifies the file and explains
        return None


def require_same_model(path: Path, saved: dict[str, Any], config: Config) -> None:
    """Raise a ConfigError that names the keys if the checkpoint is of another model, data, tokenizer or seed."""
    foreign = [change for change in config_changes(saved, config) if change.is_identity]
    if foreign:
        keys = ", ".join(f"{change.key}={change.old}, but the configuration has {change.new}" for change in foreign)
        raise ConfigError(
            f"{path} was trained with {keys}: resume with the configuration it was trained with, "
            "or choose another train.out_dir and start without --resume"
        )


def require_whole_state(path: Path, state: State, model: dict[str, Tensor], trained: Iterable[str]) -> None:
    """Raise DamagedCheckpoint unless the state fits `model` and its `trained` names; the message names the tensor.

    A fused optimizer does not check what it is given: a moment of a wrong shape is an invalid memory access.
    """
    wrong = [*_problems_of_model(state, model), *_problems_of_optimizer(state, model, set(trained))]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise DamagedCheckpoint(f"checkpoint {path} cannot be used: {wrong[0]}{more}")


def _problems_of_model(state: State, model: dict[str, Tensor]) -> Iterator[str]:
    step, saved = state.get("step"), state["model"]
    if not isinstance(step, int) or step < 0:
        yield f"its step is {step}"
    yield from (f"weight {name} is missing" for name in model if name not in saved)
    yield from (f"the model has no weight {name}" for name in saved if name not in model)
    for name in model.keys() & saved.keys():
        yield from _problems_of(f"weight {name}", saved[name], model[name])


def _problems_of_optimizer(state: State, model: dict[str, Tensor], trained: set[str]) -> Iterator[str]:
    saved = state["optimizer"]
    # A parameter that no gradient ever reached has no moments. Checkpoints name these; the oldest ones do not.
    unreached = set(state.get("without_moments", trained if saved or state["step"] == 0 else ()))
    yield from (f"the moments of {name} are missing" for name in sorted(trained - saved.keys() - unreached))
    yield from (f"the model does not train {name}, which has moments" for name in saved if name not in trained)
    for name in trained & saved.keys():
        yield from _problems_of_moments(name, saved[name], model[name])


def _problems_of_moments(name: str, moments: dict[str, Tensor], parameter: Tensor) -> Iterator[str]:
    if set(moments) == MUON_MOMENTS:
        yield from _problems_of(f"momentum_buffer of {name}", moments["momentum_buffer"], parameter)
        return
    if set(moments) != MOMENTS:
        yield f"the moments of {name} are {', '.join(sorted(moments))}; they must be {', '.join(sorted(MOMENTS))}"
        return
    for key in ("exp_avg", "exp_avg_sq"):
        yield from _problems_of(f"{key} of {name}", moments[key], parameter)
    step = moments["step"]
    if step.numel() != 1 or not 0 <= float(step) < math.inf:
        yield f"the optimizer step of {name} is {step.tolist()}"


def _problems_of(name: str, tensor: Tensor, parameter: Tensor) -> Iterator[str]:
    if tensor.shape != parameter.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, the model has {tuple(parameter.shape)}"
    elif tensor.dtype != parameter.dtype:
        yield f"{name} is {tensor.dtype}, the model is {parameter.dtype}"
    elif not bool(_local(tensor).isfinite().all()):
        yield f"{name} holds values that are not finite"


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
