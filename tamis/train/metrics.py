"""The metrics of one step: one vector, averaged over the ranks on the device and read by the host without a sync.

Also timestamps on the device, since the time between two of them is read as late as the metrics.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tamis.model.decoder import GATE_STATISTICS

Note = TypeVar("Note")
Timestamp = float | torch.cuda.Event


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step over all ranks."""

    loss: float  # mean, nats per token
    lacks_data: bool  # a rank had no batch, so no rank updated its weights
    flags: list[bool]  # the flags given to the step, each true if it was true on any rank
    gates: list[list[float]] | None  # mean per NSA layer, see GATE_STATISTICS; None without any
    grad_norm: float  # of the averaged gradient, before clipping
    weights_differ: bool


def pack_own(loss: Tensor, lacks_data: bool, flags: Sequence[bool], gates: Tensor | None) -> Tensor:
    """Return the part of the vector that one rank contributes to the average."""
    known = torch.tensor([float(lacks_data), *map(float, flags)]).to(loss.device, non_blocking=True)
    measured = [] if gates is None else [gates.flatten().float()]
    return torch.cat([loss.reshape(1).float(), known, *measured])


def forbids_update(averaged: Tensor) -> Tensor:
    """Return a boolean on the device: a rank's loss is not finite, or a rank had no data."""
    return ~averaged[0].isfinite() | (averaged[1] > 0)


def pack_step(averaged: Tensor, grad_norm: Tensor, weights_differ: Tensor) -> Tensor:
    """Return the whole vector: the averaged part, then what is the same on every rank."""
    return torch.cat([averaged, grad_norm.reshape(1).float(), weights_differ.reshape(1)])


def unpack_step(values: list[float], flags: int) -> StepMetrics:
    loss, lacks_data, *rest, grad_norm, differ = values
    gates = rows_of(rest[flags:], len(GATE_STATISTICS)) or None
    return StepMetrics(loss, lacks_data > 0, [f > 0 for f in rest[:flags]], gates, grad_norm, differ > 0)


def rows_of(values: list[float], width: int) -> list[list[float]]:
    """Split a flat list into rows: one per layer that has these statistics."""
    return [values[i : i + width] for i in range(0, len(values), width)]


class AsyncReadback(Generic[Note]):
    """Copy vectors to the host in order, each with a note of the host. Neither side waits for the other.

    On a GPU the copy is asynchronous and read one step later; on a CPU it is ready at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.lag = 1 if self.is_cuda else 0  # steps the host may run ahead of the device
        self._pending: deque[tuple[Note, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, note: Note, vector: Tensor) -> None:
        event = None
        if self.is_cuda:
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            vector = host
        self._pending.append((note, vector, event))

    def pop(self, keep: int) -> Iterator[tuple[Note, list[float]]]:
        """Yield everything but the newest `keep` entries, each as soon as the device has finished it."""
        while len(self._pending) > keep:
            note, vector, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            yield note, vector.tolist()


def timestamp(device: torch.device) -> Timestamp:
    """Record a CUDA event, or on a CPU read perf_counter: elapsed time without a host sync."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Timestamp, end: Timestamp) -> float:
    """Return the elapsed time. On a GPU, call it only after the device has passed both."""
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3  # type: ignore[arg-type]
    return end - begin  # type: ignore[operator]
