"""φ compresses every block of `l` keys (or values), one each `d` tokens, into a single one.

A block is `l/d` pieces of `d` tokens, shared with its neighbours. The first matrix is applied to each piece once for
each offset the piece may have in a block; the results are shifted and added. No overlapping copy is made. Pieces of
packed documents begin anywhere in the row, so they are copied to where a single document would have them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.packing import PackedRow
from tamis.attention.spec import NSASpec


class Compression(nn.Module):
    """φ of a sequence, or of packed documents."""

    def __init__(self, spec: NSASpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x_BSGD: Tensor, row: PackedRow | None = None) -> Tensor:
        """Return `[B,N,G,D]`, one per block."""
        if row is None or not self.spec.compressed_blocks(row.tokens):
            return self.of_sequence(x_BSGD)
        layout = row.pieces(self.spec)
        pieces: Tensor = _Rearrange.apply(x_BSGD, layout.token_of_slot, layout.slot_of_token)  # type: ignore[no-untyped-call]
        blocks = self.of_sequence(pieces)
        return cast(Tensor, _Rearrange.apply(blocks, layout.piece_of_block, layout.block_of_piece))  # type: ignore[no-untyped-call]

    def of_sequence(self, x_BSGD: Tensor) -> Tensor:
        raise NotImplementedError


class MeanCompression(Compression):
    """φ = mean of the block."""

    def of_sequence(self, x_BSGD: Tensor) -> Tensor:
        pieces = _pieces(x_BSGD, self.spec).float().mean(dim=2)  # [B, P, G, D]
        per_block = self.spec.pieces_per_compressed
        blocks = self.spec.compressed_blocks(x_BSGD.shape[1])
        return torch.stack([pieces[:, m : m + blocks] for m in range(per_block)]).mean(dim=0).to(x_BSGD.dtype)


class LearnedCompression(Compression):
    """φ = MLP over the block's tokens with an embedding of their offset in the block, shared by the groups."""

    def __init__(self, spec: NSASpec, dim: int) -> None:
        super().__init__(spec)
        self.place = nn.Parameter(torch.zeros(spec.l, dim))  # the offset embedding; checkpoints hold it by this name
        self.hidden = nn.Linear(spec.l * dim, dim)
        self.out = nn.Linear(dim, dim)

    def of_sequence(self, x_BSGD: Tensor) -> Tensor:
        spec, dim = self.spec, x_BSGD.shape[-1]
        per_block, blocks = spec.pieces_per_compressed, spec.compressed_blocks(x_BSGD.shape[1])
        weight = self.hidden.weight.view(dim, per_block, spec.d * dim)
        # The product of the offset embedding and the first matrix is a constant, so it joins the bias.
        bias = self.hidden.bias + self.hidden.weight @ self.place.flatten()
        pieces = _pieces(x_BSGD, spec).transpose(2, 3).flatten(3)  # [B, P, G, d·D]
        partial = F.linear(pieces, weight.permute(1, 0, 2).reshape(per_block * dim, -1)).unflatten(-1, (per_block, dim))
        total = sum(partial[:, m : m + blocks, :, m] for m in range(per_block))
        return self.out(F.silu(total + bias))


class _Rearrange(torch.autograd.Function):
    """`x[:, index]` with the gradient `d[:, inverse]`, 0 where that is −1: a sum over repeats would be slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[:, index]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return d_out[:, inverse.clamp_min(0)].where((inverse >= 0)[:, None, None], 0), None, None


def _pieces(x_BSGD: Tensor, spec: NSASpec) -> Tensor:
    """Return `[B, P, d, G, D]`: the stride-d pieces that some whole block covers."""
    blocks = spec.compressed_blocks(x_BSGD.shape[1])
    pieces = blocks + spec.pieces_per_compressed - 1 if blocks else 0
    return x_BSGD[:, : pieces * spec.d].unflatten(1, (pieces, spec.d))
