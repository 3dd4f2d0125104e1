"""Forward and backward of a micro-batch as one CUDA graph: a small batch is bound by launches, not by arithmetic.

The gradients live in fixed buffers that every replay adds to; the optimizer zeroes them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WARM_UP = 3  # runs before the capture: compilation and the allocator must have settled

ForwardBackward = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # tokens → detached loss and gate statistics


class GraphedMicroBatch:
    """Captures `work` at the first call, replays it ever after; the tokens must keep their shape."""

    def __init__(self, work: ForwardBackward, parameters: Iterable[nn.Parameter]) -> None:
        self._work, self._parameters = work, list(parameters)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._graph is None:
            self._capture(tokens_BS1)
        assert self._graph is not None
        self._tokens.copy_(tokens_BS1)
        self._graph.replay()
        loss, gates = self._outputs
        return loss.clone(), None if gates is None else gates.clone()  # the next replay overwrites them

    def _capture(self, tokens_BS1: Tensor) -> None:
        self._tokens = tokens_BS1.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._work(self._tokens)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._work(self._tokens)
        for parameter in self._parameters:  # what the warm-up and the capture added is not this step's
            if parameter.grad is not None:
                parameter.grad.zero_()
