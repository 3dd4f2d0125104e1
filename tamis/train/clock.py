"""Marks in time on whichever device computes: between two of them lie seconds that nobody waited for."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """On a GPU only once the device has passed both."""
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3  # type: ignore[arg-type]
    return end - begin  # type: ignore[operator]
