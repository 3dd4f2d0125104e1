"""Steps of decoding and tiles of a prompt: captured once as a CUDA graph and replayed, or simply run on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.model import Decoder
from tamis.model.cache import Cache

WARM_UP_STEPS = 3  # kernels are compiled and libraries set up before the capture


class TileReader:
    """Called with a prompt's tiles in turn, gives the hidden state `[B,E]` that follows each.

    The kernels of later tiles find their position on the device, so one graph serves all tiles of a size: the first
    such tile is simply run, the second captured.
    """

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens_BS = torch.empty(0)

    @torch.no_grad()
    def __call__(self, tokens_BS: Tensor) -> Tensor:
        if not tokens_BS.is_cuda:
            return self.model.extend(tokens_BS, self.cache)[:, -1]
        start = self.cache.tile_start(tokens_BS.shape[1])
        self.cache.reserve(tokens_BS.shape[1])
        known = self.tokens_BS.shape == tokens_BS.shape
        if type(start) is int or not known:
            if type(start) is not int:
                self.tokens_BS, self.graph = tokens_BS.clone(), None
            return self.model.read_tile(tokens_BS, self.cache, start)[:, -1]
        self.tokens_BS.copy_(tokens_BS)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.hidden_BE = self.model.read_tile(self.tokens_BS, self.cache, start)[:, -1]
        self.graph.replay()
        return self.hidden_BE.clone()


class Stepper:
    """Called with one token per sequence, gives the hidden states `[B,E]` that predict the next."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, tokens_B: Tensor) -> Tensor:
        self.cache.reserve(1)
        if not tokens_B.is_cuda:
            return self.model.step(tokens_B, self.cache)
        if self.graph is None:
            self._capture(tokens_B)
        assert self.graph is not None
        self.tokens_B.copy_(tokens_B)
        self.graph.replay()
        return self.hidden_BE

    def _capture(self, tokens_B: Tensor) -> None:
        """Warm up and capture at the present positions; the replay that follows writes the same places again."""
        self.tokens_B, positions = tokens_B.clone(), self.cache.positions_B.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.model.step(self.tokens_B, self.cache)
                self.cache.positions_B.copy_(positions)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.hidden_BE = self.model.step(self.tokens_B, self.cache)
