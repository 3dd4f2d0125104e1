"""Forward and backward of a micro-batch as a CUDA graph: a small batch is bound by launches, not by arithmetic.

The gradients live in fixed buffers. A step's first micro-batch writes them and the others add to them: two graphs,
since what a graph does is fixed. Nothing is zeroed, and a step of one micro-batch never adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WARM_UP = 3  # runs before the capture: compilation and the allocator must have settled

Outputs = tuple[Tensor, Tensor | None]  # detached loss and gate statistics
ForwardBackward = Callable[[Tensor], Outputs]


class GraphedMicroBatch:
    """Captures `work` where it is first met, replays it ever after; the tokens must keep their shape."""

    def __init__(self, work: ForwardBackward, parameters: Iterable[nn.Parameter]) -> None:
        self._work, self._parameters = work, list(parameters)
        self._captured: dict[bool, tuple[torch.cuda.CUDAGraph, Outputs]] = {}

    def __call__(self, tokens_BS1: Tensor, is_first: bool) -> Outputs:
        """`is_first` of its step: the gradients are written, not added to. The first call of all must be."""
        if not self._captured:
            self._warm_up(tokens_BS1)
        if is_first not in self._captured:
            self._captured[is_first] = self._capture()
        graph, (loss, gates) = self._captured[is_first]
        self._tokens.copy_(tokens_BS1)
        graph.replay()
        return loss.clone(), None if gates is None else gates.clone()  # the next replay overwrites them

    def _warm_up(self, tokens_BS1: Tensor) -> None:
        self._tokens = tokens_BS1.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._work(self._tokens)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in self._parameters:
            parameter.grad = None  # without a gradient to add to, the capture that follows makes the buffers

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        graph = torch.cuda.CUDAGraph()
        shared = next((other.pool() for other, _ in self._captured.values()), None)  # they never run at once
        with torch.cuda.graph(graph, pool=shared):
            return graph, self._work(self._tokens)
