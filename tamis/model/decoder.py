"""The decoder: embedding, layers, final norm; the embedding is also the output matrix."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tamis.config import Config
from tamis.model.cache import Cache
from tamis.model.dense import DenseLayer
from tamis.model.layers import RMSNorm, Rotary, SwiGLU
from tamis.model.nsa import NSALayer, gate_statistics
from tamis.model.ops.loss import linear_cross_entropy

EMBEDDING_STD = 0.02
MATRIX_GAIN = 0.55  # std = gain / sqrt(fan in): 0.02 at the width of 768, and the same variance at any other


class Block(nn.Module):
    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = NSALayer(config, rotary) if model.attention == "nsa" else DenseLayer(config, rotary)
        self.feed_forward_norm = RMSNorm(model.dim, model.norm_eps)
        self.feed_forward = SwiGLU(model.dim, model.d_ff)
        self.with_statistics = model.attention == "nsa" and config.train.aux_stats

    def forward(self, x_BSE: Tensor, branch_BSE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream and the branch still to be added to it, from block to block; and the gates' statistics.

        The addition is left to the norm that follows, which reads the stream anyway.
        """
        x_BSE, normed = self.attention_norm.of_sum(x_BSE, branch_BSE)
        attended, gates = self.attention(normed)
        x_BSE, normed = self.feed_forward_norm.of_sum(x_BSE, attended)
        return x_BSE, self.feed_forward(normed), gate_statistics(gates) if self.with_statistics else None

    def extend(self, x_BSE: Tensor, cache: Any, start: int) -> Tensor:
        return self._add(x_BSE, self.attention.extend(self.attention_norm(x_BSE), cache, start))

    def step(self, x_BE: Tensor, cache: Any, positions_B: Tensor) -> Tensor:
        return self._add(x_BE, self.attention.step(self.attention_norm(x_BE), cache, positions_B))

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x))


class _NoBranch(torch.autograd.Function):
    """Zeros that want a gradient, as every later branch does, lest the blocks be compiled twice; it is dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> None:
        return None


class Decoder(nn.Module):
    """`max_len`: longest sequence it will see, by default the one it trains on."""

    def __init__(self, config: Config, max_len: int | None = None) -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.max_len = max_len or config.train.seq_len
        rotary = Rotary(model.d_k, model.rope_base, model.rope_scale, self.max_len)
        self.embedding = nn.Embedding(config.padded_vocab_size, model.dim)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(model.n_layers))
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("embedding.weight", "place")):
                nn.init.normal_(parameter, std=EMBEDDING_STD)
            else:
                nn.init.normal_(parameter, std=self._gain(name) * parameter.shape[1] ** -0.5)

    def _gain(self, name: str) -> float:
        if ".compress_" in name:
            return 1.0  # a compressed key must weigh as much as the keys it stands for
        if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
            return MATRIX_GAIN / (2 * len(self.blocks)) ** 0.5  # keeps the residual stream's variance level with depth
        return MATRIX_GAIN

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Final hidden states `[B,S,E]` and the gate statistics `[layers, 5]` (None for the dense twin)."""
        self._check_length(tokens_BS)
        x, statistics = self.embedding(tokens_BS), []
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        branch: Tensor = _NoBranch.apply(x)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x, branch, of_block = self._run(block, x, branch)
            if of_block is not None:
                statistics.append(of_block)
        return self.norm.of_sum(x, branch)[1], torch.stack(statistics) if statistics else None

    def compile_blocks(self) -> None:
        """Compile what all layers share, once: the first step comes much sooner than with the whole model compiled."""
        for block in self.blocks:
            block.compile(fullgraph=True)

    @torch.no_grad()
    def extend(self, tokens_BS: Tensor, cache: Cache) -> Tensor:
        """Final hidden states `[B,S,E]` of a tile of tokens that join those the cache holds."""
        start = cache.tile_start(tokens_BS.shape[1])
        cache.reserve(tokens_BS.shape[1])
        return self.read_tile(tokens_BS, cache, start)

    @torch.no_grad()
    def read_tile(self, tokens_BS: Tensor, cache: Cache, start: int) -> Tensor:
        """The same from `start` on, in room the caller reserved; with a DeviceStart it may be captured in a graph."""
        x = self.embedding(tokens_BS)
        for block, kept in zip(cast(list[Block], self.blocks), cache.layers, strict=True):
            x = block.extend(x, kept, start)
        cache.positions_B += tokens_BS.shape[1]
        return self.norm(x)

    @torch.no_grad()
    def step(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        """Final hidden states `[B,E]` of one more token for each sequence; may be captured in a CUDA graph.

        The caller reserves the room (`cache.reserve(1)`), which a replayed graph cannot.
        """
        x = self.embedding(tokens_B)
        for block, kept in zip(cast(list[Block], self.blocks), cache.layers, strict=True):
            x = block.step(x, kept, cache.positions_B)
        cache.positions_B += 1
        return self.norm(x)

    def new_cache(self, batch: int = 1, max_len: int | None = None) -> Cache:
        """An empty cache in this model's dtype and on its device."""
        weight, max_len = self.embedding.weight, max_len or self.max_len
        if max_len > self.max_len:
            raise ValueError(f"a cache of {max_len} tokens is longer than the {self.max_len} this model was built for")
        return Cache(self.config, batch, max_len, weight.dtype, weight.device)

    def _run(self, block: nn.Module, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.config.runtime.gradient_checkpointing and self.training:
            return checkpoint(block, x, branch, use_reentrant=False)
        return block(x, branch)

    def loss(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean cross-entropy in nats of every token but the first, given those before it; and the gate statistics."""
        hidden, statistics = self(tokens_BS1[:, :-1])
        targets = tokens_BS1[:, 1:].flatten()
        value = linear_cross_entropy(hidden.flatten(0, 1), self.embedding.weight, targets, self.config.vocab_size)
        return value, statistics

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the real tokens; the padding of the vocabulary is cut off, so it can never be sampled."""
        weight = self.embedding.weight[: self.config.vocab_size]
        return F.linear(hidden, weight.to(hidden.dtype))

    def _check_length(self, tokens_BS: Tensor) -> None:
        if tokens_BS.shape[1] > self.max_len:
            raise ValueError(f"{tokens_BS.shape[1]} tokens are more than the {self.max_len} this model was built for")
