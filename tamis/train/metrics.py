"""The numbers of one step as one vector: averaged over the ranks and judged on the device, read by the host later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepNumbers:
    """Of one optimizer step, over all ranks."""

    loss: float  # mean, nats per token
    lacks_data: bool  # a rank had none, so that no rank updated its weights
    flags: list[bool]  # those given to the step, each true if it was on any rank
    gates: list[list[float]] | None  # mean per layer, see model.nsa.GATE_STATISTICS; None for the dense twin
    grad_norm: float  # of the averaged gradient, before clipping
    weights_differ: bool


def own_part(loss: Tensor, lacks_data: bool, flags: Sequence[bool], gates: Tensor | None) -> Tensor:
    """What one rank contributes, to be averaged over the ranks."""
    known = torch.tensor([float(lacks_data), *map(float, flags)]).to(loss.device, non_blocking=True)
    measured = [] if gates is None else [gates.flatten().float()]
    return torch.cat([loss.reshape(1).float(), known, *measured])


def forbids_update(averaged: Tensor) -> Tensor:
    """True on the device when a rank's loss is not finite or a rank had no data."""
    return ~averaged[0].isfinite() | (averaged[1] > 0)


def whole(averaged: Tensor, grad_norm: Tensor, weights_differ: Tensor) -> Tensor:
    return torch.cat([averaged, grad_norm.reshape(1).float(), weights_differ.reshape(1)])


def read(values: list[float], flags: int, layers: int) -> StepNumbers:
    loss, lacks_data, *rest, grad_norm, differ = values
    gates = rest[flags:]
    width = len(gates) // layers
    per_layer = [gates[i * width : (i + 1) * width] for i in range(layers)] if width else None
    return StepNumbers(loss, lacks_data > 0, [f > 0 for f in rest[:flags]], per_layer, grad_norm, differ > 0)
