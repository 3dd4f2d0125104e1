"""Checks that stop a run: non-finite metrics, a loss that no causal model reaches, ranks that do not agree."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tamis
from tamis.config import Config, ConfigError
from tamis.config.size import random_token_floor
from tamis.train.distributed import Ranks

SCALER_PATIENCE = 20  # fp16 skips single steps while it looks for its loss scale; this many in a row is an anomaly


class Anomaly(Exception):
    """Training must stop and nothing may be saved any more; `kind` is written to `.anomaly_type`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Guard:
    """Checks the metrics of every step."""

    def __init__(self, config: Config, is_synthetic: bool) -> None:
        self.is_synthetic = is_synthetic
        self.floor = _loss_floor(config, is_synthetic)
        self.patience = SCALER_PATIENCE if config.runtime.precision == "fp16" else 1
        self.skipped = 0

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        if not math.isfinite(loss):
            raise Anomaly("non_finite_loss", f"loss is {loss} at step {step}")
        if loss < self.floor:
            raise Anomaly("loss_below_floor", self._below_floor(step, loss))
        self.skipped = 0 if math.isfinite(grad_norm) else self.skipped + 1
        if self.skipped >= self.patience:
            raise Anomaly("non_finite_gradient", f"gradient norm is {grad_norm} at step {step}")

    def _below_floor(self, step: int, loss: float) -> str:
        where = f"loss {loss:.4f} at step {step} is below {self.floor:.4f}"
        if self.is_synthetic:
            return f"{where}: random tokens cannot be predicted, so the target leaks into the input"
        return f"{where} (train.min_loss): the target leaks into the input, or the model has memorised its data"


def _loss_floor(config: Config, is_synthetic: bool) -> float:
    if config.train.min_loss is not None:
        return config.train.min_loss
    return random_token_floor(config) if is_synthetic else 0.0


def fingerprint(config: Config, data: str, device: str) -> dict[str, str]:
    """Return what must be equal on every rank, each under the name that an error message uses."""
    return {
        "configuration": config.hash,
        "code": code_hash(),
        "data": data,
        "device": device,
        "torch version": torch.__version__,
    }


def code_hash() -> str:
    """Hash every Python source of the package."""
    root = Path(tamis.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def require_agreement(ranks: Ranks, own: dict[str, str]) -> None:
    """Raise a ConfigError when a rank's fingerprint differs; the message names the rank and what differs."""
    of_rank = ranks.gather(own)
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
    """Return the first of the most frequent values: with two ranks, rank 0's."""
    return Counter(values).most_common(1)[0][0]


def weights_differ(model: nn.Module, ranks: Ranks) -> Tensor:
    """Return 1 on the device if the ranks' weights differ in any bit, else 0, without a host sync."""
    sums = weight_sums(model)
    extremes = torch.cat((sums, -sums))
    if ranks.world_size > 1:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.chunk(2)
    return (highest != -lowest).any().float()


def weight_sums(model: nn.Module) -> Tensor:
    """Sum the bits of each parameter as integers: exact in any order of summation."""
    return torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters()])


def raise_difference(model: nn.Module, ranks: Ranks, step: int) -> None:
    """Raise an Anomaly that names the ranks whose weights differ from the others, and the first parameter of each."""
    names = [name for name, _ in model.named_parameters()]
    of_rank = ranks.gather(weight_sums(model).tolist())
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
