"""The decoder: embedding, layers, final norm; the embedding is also the output matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tamis.attention.cache import Cache
from tamis.attention.functional import Backend
from tamis.attention.layer import NSAAttention
from tamis.attention.packing import PackedRow, as_row
from tamis.attention.rotary import Rotary
from tamis.attention.spec import NSASpec, Start
from tamis.config import Config
from tamis.model.dense import DenseAttention
from tamis.model.loss import linear_cross_entropy, soft_capped
from tamis.model.norm import RMSNorm
from tamis.model.relu_squared import ReLUSquared
from tamis.model.swiglu import SwiGLU
from tamis.model.window import WindowAttention

EMBEDDING_STD = 0.02
RESIDUAL_OUTPUTS = ("attention.out.weight", "feed_forward.down.weight")  # what adds to the residual stream
MATRIX_GAIN = 0.55  # std = gain / sqrt(fan in): 0.02 at the width of 768, and the same variance at any other
MOST_SHAPES = 24  # that one block is compiled for: lengths of a schedule, sizes of packed offsets, validation
STATISTICS_TOKENS = 8192  # from twice as many on, gate statistics take every n-th; all would take 0.3% of a step
COLLAPSED_SHARE = 0.95  # a head whose gates give one branch more than this has collapsed
GATE_STATISTICS = ("share_compressed", "share_selected", "share_window", "entropy", "collapsed")


class Block(nn.Module):
    def __init__(self, config: Config, kind: str, rotary: Rotary, backend: Backend) -> None:
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = _attention(config, kind, rotary, backend)
        self.feed_forward_norm = RMSNorm(model.dim, model.norm_eps)
        self.feed_forward = (SwiGLU if model.mlp == "swiglu" else ReLUSquared)(model.dim, model.d_ff)
        self.with_statistics = kind == "nsa" and config.train.aux_stats

    def forward(
        self, x_BSE: Tensor, branch_BSE: Tensor, row: PackedRow | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the residual stream, the branch still to be added to it, and the gate statistics.

        The next block's norm does the addition, because it reads the stream anyway.
        """
        x_BSE, normed = self.attention_norm.of_sum(x_BSE, branch_BSE)
        statistics = None
        if self.with_statistics:
            attended, gates = cast(NSAAttention, self.attention).with_gates(normed, row)
            statistics = gate_statistics(gates)
        else:
            attended = self.attention(normed, row)
        x_BSE, normed = self.feed_forward_norm.of_sum(x_BSE, attended)
        return x_BSE, self.feed_forward(normed), statistics

    def read_tile(self, x_BSE: Tensor, cache: Any, start: Any) -> Tensor:
        return self._add(x_BSE, self.attention.attend_tile(self.attention_norm(x_BSE), cache, start))

    def step(self, x_BE: Tensor, cache: Any, positions_B: Tensor) -> Tensor:
        return self._add(x_BE, self.attention.attend_token(self.attention_norm(x_BE), cache, positions_B))

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x))


def _attention(config: Config, kind: str, rotary: Rotary, backend: Backend) -> NSAAttention | DenseAttention:
    model, nsa = config.model, config.nsa
    if kind != "nsa":
        return DenseAttention(config, rotary) if kind == "dense" else WindowAttention(config, rotary)
    return NSAAttention(
        model.dim, model.n_heads, model.n_kv_groups, model.d_k, NSASpec.of(nsa), nsa.phi,
        rotary=rotary, qk_norm=model.qk_norm, backend=backend,
    )  # fmt: skip


@torch.no_grad()
def gate_statistics(gates_BSH3: Tensor) -> Tensor:
    """Return the five numbers of GATE_STATISTICS: mean share per branch, entropy of the shares in nats, collapse.

    Of many tokens it takes evenly spaced ones. Their distance is odd, because sequences and blocks are mostly powers of
    two long: so it meets every position.
    """
    gates = gates_BSH3.detach().flatten(0, 1)
    gates = gates[:: len(gates) // STATISTICS_TOKENS | 1].float()
    shares = gates / gates.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    entropy = -(shares * shares.clamp_min(1e-9).log()).sum(dim=-1)
    collapsed = (shares.amax(dim=-1) > COLLAPSED_SHARE).float()
    # As columns of one tensor, so that the compiler makes one reduction of them.
    return torch.stack((*shares.unbind(-1), entropy, collapsed), dim=-1).flatten(0, 1).mean(dim=0)


class _NoBranch(torch.autograd.Function):
    """A zero tensor with requires_grad=True, so block 0 has the same signature as the rest and compiles once.

    Its gradient is discarded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> None:
        return None


class Decoder(nn.Module):
    """The language model of a configuration.

    Args:
        max_len: longest sequence it can take, by default `train.seq_len`.
        backend: what computes NSA, as for `nsa_attention`; training leaves it at `"auto"`.
    """

    def __init__(self, config: Config, max_len: int | None = None, backend: Backend = "auto") -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.max_len = max_len or config.train.seq_len
        rotary = Rotary(model.d_k, model.rope_base, model.rope_scale, self.max_len)
        self.embedding = nn.Embedding(config.padded_vocab_size, model.dim)
        self.blocks = nn.ModuleList(Block(config, kind, rotary, backend) for kind in config.layer_kinds)
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("embedding.weight", "place")):
                nn.init.normal_(parameter, std=EMBEDDING_STD)
            elif self.config.train.zero_init and name.endswith(RESIDUAL_OUTPUTS):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self._gain(name) * parameter.shape[1] ** -0.5)

    def _gain(self, name: str) -> float:
        if ".compress_" in name:
            return 1.0  # a compressed key has the variance of the keys it replaces
        if name.endswith(RESIDUAL_OUTPUTS):
            return MATRIX_GAIN / (2 * len(self.blocks)) ** 0.5  # keeps the residual stream's variance level with depth
        return MATRIX_GAIN

    def forward(self, tokens_BS: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the final hidden states `[B,S,E]` and the gate statistics `[NSA layers, 5]`, or None.

        `cu_seqlens`, int32 `[documents + 1]`, packs documents: their offsets in the B·S tokens, row after row, from 0
        to B·S. Repeat B·S to pad the offsets to a fixed size. No document crosses the end of a row.
        """
        self._check_length(tokens_BS)
        x, statistics = self.embedding(tokens_BS), []
        row = self.packed_row(cu_seqlens, tokens_BS.numel())
        if row is not None:
            x = x.flatten(0, 1)[None]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        branch: Tensor = _NoBranch.apply(x)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x, branch, block_statistics = self._run(block, x, branch, row)
            if block_statistics is not None:
                statistics.append(block_statistics)
        hidden = self.norm.of_sum(x, branch)[1].view(*tokens_BS.shape, -1)
        return hidden, torch.stack(statistics) if statistics else None

    @torch.no_grad()
    def nsa_layers(self, tokens_BS: Tensor, row: PackedRow | None = None) -> Iterator[tuple[NSAAttention, Tensor]]:
        """Yield each NSA layer with its input `[B,S,E]`; blocks run outside compiled code and CUDA graphs.

        Their parameters must be whole.
        """
        x = self.embedding(tokens_BS)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        branch = torch.zeros_like(x)
        for block in self._blocks():
            if isinstance(block.attention, NSAAttention):
                yield block.attention, block.attention_norm.of_sum(x, branch)[1]
            x, branch, _ = block.forward(x, branch, row)

    def packed_row(self, cu_seqlens: Tensor | None, tokens: int) -> PackedRow | None:
        """Return the packed documents of so many tokens as all layers read them."""
        return as_row(cu_seqlens, tokens, NSASpec.of(self.config.nsa))

    def compile_blocks(self) -> None:
        """Compile one block for all layers, which is much faster than compiling the whole model.

        Each length of a schedule, and each size of the offsets of packed documents, is compiled for itself: the kernels
        choose their tiles by it. Beyond the limit, by default 8, compiling would be an error.
        """
        import torch._dynamo  # here, because it loads slowly

        torch._dynamo.config.recompile_limit = MOST_SHAPES
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False)

    @torch.no_grad()
    def extend(self, tokens_BS: Tensor, cache: Cache) -> Tensor:
        """Append a tile of tokens to the cache; return their final hidden states `[B,S,E]`."""
        start = cache.tile_start(tokens_BS.shape[1])
        cache.reserve(tokens_BS.shape[1])
        return self.read_tile(tokens_BS, cache, start)

    @torch.no_grad()
    def read_tile(self, tokens_BS: Tensor, cache: Cache, start: Start) -> Tensor:
        """Do the same from `start` on, in room the caller reserved; with a DeviceStart, a CUDA graph can capture it."""
        x = self.embedding(tokens_BS)
        for block, layer_cache in zip(self._blocks(), cache.layers, strict=True):
            x = block.read_tile(x, layer_cache, start)
        cache.positions_B += tokens_BS.shape[1]
        return self.norm(x)

    @torch.no_grad()
    def step(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        """Append one token to each sequence; return their final hidden states `[B,E]`. A CUDA graph can capture it.

        The caller reserves the room (`cache.reserve(1)`), which a replayed graph cannot.
        """
        x = self.embedding(tokens_B)
        for block, layer_cache in zip(self._blocks(), cache.layers, strict=True):
            x = block.step(x, layer_cache, cache.positions_B)
        cache.positions_B += 1
        return self.norm(x)

    def new_cache(self, batch: int = 1, max_len: int | None = None) -> Cache:
        """Return an empty cache in this model's dtype and on its device."""
        max_len = max_len or self.max_len
        if max_len > self.max_len:
            raise ValueError(f"a cache of {max_len} tokens is longer than the {self.max_len} this model was built for")
        return Cache([block.attention.layer_cache(batch, max_len) for block in self._blocks()], batch, max_len)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], self.blocks)

    def _run(
        self, block: nn.Module, x: Tensor, branch: Tensor, row: PackedRow | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.config.runtime.gradient_checkpointing and self.training:
            return checkpoint(block, x, branch, row, use_reentrant=False)
        return block(x, branch, row)

    def loss(self, tokens_BS1: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the mean cross-entropy in nats of every token after the first, and the gate statistics.

        `cu_seqlens` holds the offsets of packed documents in the B·S inputs, as for `forward`.
        """
        hidden, statistics = self(tokens_BS1[:, :-1], cu_seqlens)
        targets = tokens_BS1[:, 1:].flatten()
        weight, config = self.embedding.weight, self.config
        hidden_TE, soft_cap = hidden.flatten(0, 1), config.model.logit_soft_cap
        return linear_cross_entropy(hidden_TE, weight, targets, config.vocab_size, soft_cap), statistics

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the real tokens, without the padding of the vocabulary."""
        weight = self.embedding.weight[: self.config.vocab_size]
        return soft_capped(F.linear(hidden, weight.to(hidden.dtype)), self.config.model.logit_soft_cap)

    def _check_length(self, tokens_BS: Tensor) -> None:
        if tokens_BS.shape[1] > self.max_len:
            raise ValueError(f"{tokens_BS.shape[1]} tokens are more than the {self.max_len} this model was built for")
