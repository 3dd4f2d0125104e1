"""The NSA layer: projections per branch, rotary positions, compression and gates around `nsa_attention`.

Shapes: B batch, S tokens, E width, H query heads, G key/value heads (groups), D head dim, C all heads of a projection,
2: key, then value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.cache import Cache, NSACache
from tamis.attention.compress import (
    Compression,
    LearnedCompression,
    MeanCompression,
    compress_pieces,
    compress_together,
)
from tamis.attention.decode import nsa_decode, tile_attention
from tamis.attention.functional import Backend, nsa_attention, select_blocks
from tamis.attention.packing import PackedRow, as_row
from tamis.attention.rotary import Rotary, normalise_heads, split_heads
from tamis.attention.spec import NSASpec, Start, latest_start

ROTATED = [True, False, True, False, True, False, False]  # of the parts: queries, keys of the selected and the window
DEFAULT_MAX_LEN = 32768
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class NSAAttention(nn.Module):
    """Native Sparse Attention as a layer: `[B,S,dim]` to `[B,S,dim]`, causal.

    Args:
        dim: width of the input and output.
        heads: query heads; a multiple of `kv_heads`.
        kv_heads: key/value heads (groups).
        head_dim: size of one head, even.
        spec: block sizes and counts.
        phi: how a block is compressed: `"mlp"` (learned) or `"avg"` (mean).
        max_len: longest sequence; sizes the rotary tables.
        rope_base, rope_scale: rotary frequencies; positions are divided by `rope_scale`.
        rotary: tables shared with other layers; replaces the three arguments above.
        qk_norm: divide queries, and keys of every branch, by their root mean square before they are rotated.
        backend: `"auto"`, `"reference"` or `"triton"`, as for `nsa_attention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        spec: NSASpec,
        phi: str = "mlp",
        *,
        max_len: int = DEFAULT_MAX_LEN,
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        _check_sizes(heads, kv_heads, head_dim, phi)
        self.spec, self.phi, self.qk_norm, self.backend = spec, phi, qk_norm, backend
        self.heads, self.groups, self.dim = heads, kv_heads, head_dim
        self.rotary = rotary or Rotary(head_dim, rope_base, rope_scale, max_len)
        # Queries, then keys and values of the compressed, selected and window branches: one matrix, one product.
        self.project = nn.Linear(dim, (heads + 6 * kv_heads) * head_dim, bias=False)
        self.gate = nn.Linear(dim, heads * 3)
        self.compress_k, self.compress_v = (self._compression() for _ in range(2))
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def _compression(self) -> Compression:
        return LearnedCompression(self.spec, self.dim) if self.phi == "mlp" else MeanCompression(self.spec)

    @property
    def max_len(self) -> int:
        return self.rotary.cos.shape[0]

    def forward(self, x_BSE: Tensor, cu_seqlens: Tensor | PackedRow | None = None) -> Tensor:
        """Return the output `[B,S,dim]` for `x [B,S,dim]`.

        With `cu_seqlens`, int32 `[documents + 1]`, B is 1 and the row holds documents of up to `max_len` tokens each:
        document `i` is tokens `cu_seqlens[i] … cu_seqlens[i+1]−1`, and each attends as if it were alone. Layers of a
        model share its `PackedRow`.
        """
        return self.with_gates(x_BSE, cu_seqlens)[0]

    def with_gates(self, x_BSE: Tensor, cu_seqlens: Tensor | PackedRow | None = None) -> tuple[Tensor, Tensor]:
        """Return the output and the gates `[B,S,H,3]`."""
        self._check_width(x_BSE, "batch", "tokens")
        if x_BSE.shape[1] > self.max_len and cu_seqlens is None:
            raise ValueError(f"{x_BSE.shape[1]} tokens are more than max_len={self.max_len} of this layer")
        row = as_row(cu_seqlens, x_BSE.shape[1], self.spec)
        inputs = self.attention_inputs(x_BSE, row)
        mixed = nsa_attention(*inputs, self.spec, self.backend, cu_seqlens=row, max_seqlen=self.max_len)
        return self.out(mixed.flatten(2)), inputs[-1]

    def _check_width(self, x: Tensor, *before: str) -> None:
        width = self.project.in_features
        if x.dim() != len(before) + 1 or x.shape[-1] != width:
            raise ValueError(f"x must have shape [{', '.join(before)}, {width}], got {list(x.shape)}")

    def attention_inputs(self, x_BSE: Tensor, row: PackedRow | None = None) -> AttentionInputs:
        """Return the tensor arguments of `nsa_attention`: queries, keys and values of each branch, gates."""
        piece = tokens_of_piece(x_BSE.shape[1], self.spec) if row is None else 0
        q, to_compress, k_sel, v_sel, k_win, v_win, logits = self._parts(x_BSE, *self.rotary.tables(row), piece)
        gates = self.gates(logits.flatten(2))
        k_cmp, v_cmp = self._compressed(to_compress, row)
        return q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates

    def _compressed(self, to_compress: Tensor, row: PackedRow | None) -> tuple[Tensor, Tensor]:
        """Compress a part `[B,S,C,D]`, or one that came in pieces."""
        kv = to_compress if to_compress.dim() == 6 else to_compress.unflatten(2, (2, self.groups))
        if row is None:
            return self.compress(kv)
        k, v = self._compress_unrotated(kv, row)
        return self.rotary(k, row.layout(self.spec).last_position), v

    @torch.no_grad()
    def selected_blocks(self, x_BSE: Tensor, cu_seqlens: Tensor | PackedRow | None = None) -> Tensor:
        """Return the ids of the blocks each query and group attends to, `[B,S,G,n_sel]`, as `select_blocks` does."""
        self._check_width(x_BSE, "batch", "tokens")
        row = as_row(cu_seqlens, x_BSE.shape[1], self.spec)
        q, to_compress, *_ = self._parts(x_BSE, *self.rotary.tables(row))
        k_cmp, _ = self._compressed(to_compress, row)
        return select_blocks(q, k_cmp, self.spec, self.backend, cu_seqlens=row, max_seqlen=self.max_len)

    def _parts(self, x_BSE: Tensor, cos: Tensor, sin: Tensor, piece: int = 0) -> list[Tensor]:
        """Return queries, keys and values as attention takes them, and the gates' logits as padded heads.

        The keys and values to compress are one part, because one product compresses both; with `piece` they come in
        pieces of as many tokens, and are not copied again.
        All come from one product: with two, each would read the tokens and produce a gradient to be added.
        """
        sizes = heads_of_parts(self.heads, self.groups, self.dim)
        gate_weight = F.pad(self.gate.weight, (0, 0, 0, sizes[-1] * self.dim - self.gate.out_features))
        heads = self._normed(
            F.linear(x_BSE, torch.cat((self.project.weight, gate_weight))).unflatten(-1, (-1, self.dim))
        )
        return split_heads(heads, cos, sin, sizes, ROTATED, piece)

    def new_cache(self, batch: int, max_len: int | None = None) -> Cache:
        """Return an empty cache for `batch` sequences of up to `max_len` tokens, for `prefill` and `step`."""
        max_len = max_len or self.max_len
        if max_len > self.max_len:
            raise ValueError(f"a cache of {max_len} tokens is longer than max_len={self.max_len} of this layer")
        return Cache([self.layer_cache(batch, max_len)], batch, max_len)

    def layer_cache(self, batch: int, max_len: int) -> NSACache:
        """Return this layer's part of a cache, in its dtype and on its device."""
        weight = self.project.weight
        return NSACache(self.spec, self.phi, self.groups, self.dim, batch, max_len, weight.dtype, weight.device)

    @torch.no_grad()
    def prefill(self, x_BSE: Tensor, cache: Cache) -> Tensor:
        """Return the output `[B,S,dim]` for S tokens that follow those in the cache, and append them to it."""
        self._check_width(x_BSE, "batch", "tokens")
        start = cache.tile_start(x_BSE.shape[1])
        cache.reserve(x_BSE.shape[1])
        out = self.attend_tile(x_BSE, cache.layers[0], start)
        cache.positions_B += x_BSE.shape[1]
        return out

    @torch.no_grad()
    def step(self, x_BE: Tensor, cache: Cache) -> Tensor:
        """Return the output `[B,dim]` for the next token of each sequence, and append it to the cache."""
        self._check_width(x_BE, "batch")
        cache.reserve(1)
        out = self.attend_token(x_BE, cache.layers[0], cache.positions_B)
        cache.positions_B += 1
        return out

    def attend_tile(self, x_BSE: Tensor, cache: NSACache, start: Start) -> Tensor:
        """Return the output for tokens `start … start+S−1` and write them to the cache."""
        end = latest_start(start) + x_BSE.shape[1]
        q, window = self._write_tile(self._heads(x_BSE), cache, start)
        compressed = cache.compressed_BN2GD[:, : self.spec.compressed_blocks(end)]
        mixed, chosen = tile_attention(
            q, compressed, cache.selected_BT2GD[:, :end], window, self._inference_gates(x_BSE), self.spec, start,
            first_key=end - window.shape[1],
        )  # fmt: skip
        cache.chosen_BGn.copy_(chosen)
        return self.out(mixed.flatten(2))

    def attend_token(self, x_BE: Tensor, cache: NSACache, positions_B: Tensor) -> Tensor:
        """Return the output for one token of each sequence, at its own position, without a host sync."""
        q = self._write_token(self._heads(x_BE[:, None]), cache, positions_B)
        cached = (cache.compressed_BN2GD, cache.selected_BT2GD, cache.window.slots_BW2GD)
        mixed, _, _ = nsa_decode(
            q, *cached, self._inference_gates(x_BE), positions_B, self.spec, into=(cache.chosen_BGn, cache.reads_BG)
        )
        return self.out(mixed.flatten(1))

    def _write_tile(self, heads_BSCD: Tensor, cache: NSACache, start: Start) -> tuple[Tensor, Tensor]:
        """Write tokens from `start` on to the cache; return their queries, and the window from its first key on."""
        if cache.written_by_kernels:
            from tamis.attention.kernels.cache_writes import write_tile

            return write_tile(self, heads_BSCD, cache, start)
        start = latest_start(start)
        end = start + heads_BSCD.shape[1]
        positions = torch.arange(start, end, device=heads_BSCD.device)
        q, raw, selected, window = self._rotated(heads_BSCD, positions)
        before, after = self.spec.compressed_blocks(start), self.spec.compressed_blocks(end)
        pending = torch.cat((cache.tail.newest(start - before * self.spec.d, start), raw), dim=1)
        cache.compressed_BN2GD[:, before:after] = torch.stack(self.compress(pending, before), dim=2)
        cache.selected_BT2GD[:, start:end] = selected
        recent = torch.cat((cache.window.newest(min(start, self.spec.w - 1), start), window), dim=1)
        cache.tail.write(raw, start)
        cache.window.write(window, start)
        return q, recent

    def _write_token(self, heads_B1CD: Tensor, cache: NSACache, positions_B: Tensor) -> Tensor:
        """Write one token of each sequence to the cache; return their queries."""
        if cache.written_by_kernels:
            from tamis.attention.kernels.cache_writes import write_token

            return write_token(self, heads_B1CD, cache, positions_B)
        # The batch takes the dimension of a tile's tokens, because each sequence has its own position.
        q, raw, selected, window = (t[0] for t in self._rotated(heads_B1CD.transpose(0, 1), positions_B))
        cache.tail.write_one(raw, positions_B)
        k_cmp, v_cmp = self._compress_unrotated(cache.tail.newest_of_each(positions_B))
        k_cmp = self.rotary(k_cmp.transpose(0, 1), positions_B)[0]  # a block that ends now is rotated to now
        cache.write_block(torch.stack((k_cmp, v_cmp[:, 0]), dim=1), positions_B)
        cache.write_one(selected, positions_B)
        cache.window.write_one(window, positions_B)
        return q

    def _rotated(self, heads_BSCD: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, then keys with values `[B,S,2,G,D]`: unrotated for compression, rotated for the others."""
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = self._by_branch(heads_BSCD)
        q, k_sel, k_win = (self.rotary(t, positions_S) for t in (q, k_sel, k_win))
        pairs = ((k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win))
        raw, selected, window = (torch.stack(pair, dim=2) for pair in pairs)
        return q, raw, selected, window

    def _heads(self, x_BSE: Tensor) -> Tensor:
        return self._normed(self.project(x_BSE).unflatten(-1, (-1, self.dim)))

    def _normed(self, heads_BSCD: Tensor) -> Tensor:
        """Return the heads with QK-norm applied, if this layer has it; keys and values alternate."""
        groups = self.groups
        counts = [self.heads + groups, *[groups] * 4]
        return normalise_heads(heads_BSCD, *counts) if self.qk_norm else heads_BSCD

    def _by_branch(self, heads_BSCD: Tensor) -> list[Tensor]:
        """Return queries `[B,S,H,D]` and the six keys and values `[B,S,G,D]`, unrotated."""
        return list(heads_BSCD.split([self.heads] + [self.groups] * 6, dim=2))

    def gates(self, logits_BSN: Tensor) -> Tensor:
        """Return `[B,S,H,3]` from logits that may be followed by padding."""
        biased = logits_BSN[..., : self.gate.out_features].float() + self.gate.bias
        return torch.sigmoid(biased).to(logits_BSN.dtype).unflatten(-1, (self.heads, 3))

    def _inference_gates(self, x_BSE: Tensor) -> Tensor:
        """Return the gates by a product of their own, which needs no copy of the weights."""
        return torch.sigmoid(self.gate(x_BSE)).unflatten(-1, (self.heads, 3))

    def compress(self, kv: Tensor, first_block: int = 0) -> tuple[Tensor, Tensor]:
        """Return compressed keys, rotated to their block's last position, and values, from block `first_block` on.

        Keys and values are `[B,S,2,G,D]`, or come in pieces: `[2,B,P,G,d,D]`.
        """
        k, v = self._compress_unrotated(kv)
        blocks = torch.arange(first_block, first_block + k.shape[1], device=k.device)
        return self.rotary(k, blocks * self.spec.d + self.spec.l - 1), v

    def _compress_unrotated(self, kv: Tensor, row: PackedRow | None = None) -> tuple[Tensor, ...]:
        phis = (self.compress_k, self.compress_v)
        return compress_pieces(phis, kv) if kv.dim() == 6 else compress_together(phis, kv, row)


def tokens_of_piece(tokens: int, spec: NSASpec) -> int:
    """Return how many tokens the pieces have that φ takes a sequence in, or 0 if its last one is not whole."""
    return spec.d if tokens % spec.d == 0 and tokens >= spec.l else 0


def heads_of_parts(heads: int, groups: int, dim: int) -> list[int]:
    """Return how many heads each part has that the layer cuts its product into; the gates' logits are padded."""
    return [heads, 2 * groups, *[groups] * 4, -(-3 * heads // dim)]


def _check_sizes(heads: int, kv_heads: int, head_dim: int, phi: str) -> None:
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    if phi not in ("mlp", "avg"):
        raise ValueError(f'phi must be "mlp" or "avg", got {phi!r}')
