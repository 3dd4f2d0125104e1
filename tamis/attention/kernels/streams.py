"""How the branches of attention are queued: next to each other inside a CUDA graph, and under names for a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

FEW_TOKENS = 8192  # up to here the kernels of one branch leave most of a GPU idle


def side_stream(q_BSHD: Tensor) -> torch.cuda.Stream | None:
    """A stream whose launches run next to those of the current stream until `wait_for_side`; None: they run one by one.

    Only for few tokens, and only while a CUDA graph is captured: there it costs the host nothing. What is allocated on
    the stream may be freed any time after `wait_for_side`, because its next use waits for the current stream.
    """
    if not q_BSHD.is_cuda or q_BSHD.shape[0] * q_BSHD.shape[1] > FEW_TOKENS:
        return None
    side = _side_stream(q_BSHD.device)  # made before the capture, which a warm-up precedes
    if not torch.cuda.is_current_stream_capturing():
        return None
    side.wait_stream(torch.cuda.current_stream())
    return side


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launched_on(side: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if side is None else torch.cuda.stream(side)


def wait_for_side(side: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for what was launched on `side`."""
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """A named range for a running profiler. Without one `record_function` would still cost about 10 µs of host time."""
    profiling = torch.autograd.profiler._is_profiler_enabled
    return torch.profiler.record_function(name) if profiling else nullcontext()
