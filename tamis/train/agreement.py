"""What the ranks of a run must agree on: what they train, on which data, with which code, and that it went well.

A rank that is alone with an error or a difference would leave the others waiting; here all of them learn of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tamis
from tamis.config import Config, ConfigError
from tamis.data import DataError, EndOfData
from tamis.run.files.lock import RunLocked
from tamis.run.files.manifest import DamagedCheckpoint
from tamis.train.distributed import Workers
from tamis.train.guards import Anomaly

# The first that fits is raised everywhere, so a special case comes before the general one.
SHARED_ERRORS: tuple[type[Exception], ...] = (ConfigError, EndOfData, DataError, DamagedCheckpoint, RunLocked, OSError)

Result = TypeVar("Result")


def together(workers: Workers, action: Callable[[], Result]) -> Result:
    """`action` on every rank; when it fails on one, all raise that rank's error, so that nobody waits for it."""
    try:
        result, failure = action(), None
    except SHARED_ERRORS as error:
        if workers.world_size == 1:
            raise
        failure = next([number, str(error)] for number, kind in enumerate(SHARED_ERRORS) if isinstance(error, kind))
    failures = workers.gather(failure)
    for rank, found in enumerate(failures):
        if found is not None:
            number, message = found
            everywhere = all(other == found for other in failures)
            raise SHARED_ERRORS[number](message if everywhere else f"rank {rank}: {message}")
    return result


def fingerprint(config: Config, data: str, device: str) -> dict[str, str]:
    """What must be the same on every rank, each with the name of what to look at when it is not."""
    return {
        "configuration": config.hash,
        "code": code_hash(),
        "data": data,
        "device": device,
        "torch version": torch.__version__,
    }


def code_hash() -> str:
    """Of every Python source of the package."""
    root = Path(tamis.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def require_agreement(workers: Workers, own: dict[str, str]) -> None:
    """Refuse to train when a rank differs in its fingerprint; the message names the rank and what differs."""
    of_rank = workers.gather(own)
    odd = [
        f"rank {rank} has {name} {value!r}, the others have {usual!r}"
        for name in own
        for usual in [most_common([facts[name] for facts in of_rank])]
        for rank, value in enumerate(facts[name] for facts in of_rank)
        if value != usual
    ]
    if odd:
        raise ConfigError("the ranks do not agree, so nothing was trained: " + "; ".join(odd))


def most_common(values: list[Any]) -> Any:
    """The first of the values that occur most often: with two ranks, rank 0's."""
    return Counter(values).most_common(1)[0][0]


def weights_differ(model: nn.Module, workers: Workers) -> Tensor:
    """1 on the device when the ranks' weights differ in any bit, else 0. Nothing here waits for the host."""
    sums = weight_sums(model)
    extremes = torch.cat((sums, -sums))
    if workers.world_size > 1:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.chunk(2)
    return (highest != -lowest).any().float()


def weight_sums(model: nn.Module) -> Tensor:
    """Of each parameter, its bits added up as integers: exact, whatever the order of the sum."""
    return torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters()])


def raise_difference(model: nn.Module, workers: Workers, step: int) -> None:
    """Name the rank whose weights have left the others, and the parameters."""
    names = [name for name, _ in model.named_parameters()]
    of_rank = workers.gather(weight_sums(model).tolist())
    usual = [most_common(list(sums)) for sums in zip(*of_rank, strict=True)]
    odd = {
        rank: [name for name, own, other in zip(names, sums, usual, strict=True) if own != other]
        for rank, sums in enumerate(of_rank)
        if sums != usual
    }
    who = "; ".join(
        f"rank {rank} in {len(own)} of {len(names)} parameters, first {own[0]}" for rank, own in odd.items()
    )
    raise Anomaly("weights_differ", f"at step {step} the ranks no longer hold the same weights: {who}")
