"""How the branches of attention are queued: next to each other on a GPU, and under names for a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_TOKENS = 131072  # of a call: a longer one gains nothing, and its memory would lie in two pools


class SideStream:
    """A stream of high priority: what a `with` block launches runs next to what the current stream was given since.

    The selected branch goes there. Between its products it joins partial results, which is bound by memory, and makes
    lists, which leaves most of the GPU idle: the products of the other branches fill those times.

    The current stream waits at the end of the block, so what the block reads must live until then. What it allocates
    may be freed any time later, because the next use of the side stream waits for the current one.
    """

    def __init__(self, q_BSHD: Tensor) -> None:
        self._stream = None
        if q_BSHD.is_cuda and q_BSHD.shape[0] * q_BSHD.shape[1] <= MOST_TOKENS:
            self._stream = _stream_of_high_priority(q_BSHD.device)
            self._current = torch.cuda.current_stream(q_BSHD.device)
            self._begin = self._current.record_event()

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_event(self._begin)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._current)
            self._current.wait_stream(self._stream)


@cache
def _stream_of_high_priority(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """A named range for a running profiler. Without one `record_function` would still cost about 10 µs of host time."""
    profiling = torch.autograd.profiler._is_profiler_enabled
    return torch.profiler.record_function(name) if profiling else nullcontext()
