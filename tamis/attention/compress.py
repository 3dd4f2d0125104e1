"""φ compresses every block of `l` keys (or values), one each `d` tokens, into a single one.

A block is `l/d` pieces of `d` tokens, shared with its neighbours. The first matrix is applied to each piece once for
each offset the piece may have in a block; the results are shifted and added. No overlapping copy is made. Pieces of
packed documents begin anywhere in the row, so they are copied to where a single document would have them.

Shapes: B batch, S tokens, M compressions, G groups, D head dim, N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        return compress_together([self], x_BSGD[:, :, None], row)[0]

    @staticmethod
    def of_pieces(phis: Sequence[Any], pieces_MBPGdD: Tensor) -> Tensor:
        """Return `[M,B,N,G,D]`: the blocks of P pieces, the m-th of them by `phis[m]`."""
        raise NotImplementedError


def compress_together(phis: Sequence[Compression], x_BSMGD: Tensor, row: PackedRow | None = None) -> tuple[Tensor, ...]:
    """Compress `x[:, :, m]` by `phis[m]`, all of one class, and return each result `[B,N,G,D]`.

    Keys and values go together: two small products become one, which saves time in a short sequence.
    """
    spec = phis[0].spec
    if row is None or not spec.compressed_blocks(row.tokens):
        return compress_pieces(phis, _pieces(x_BSMGD, spec))
    layout = row.pieces(spec)
    slots: Tensor = _Rearrange.apply(x_BSMGD, layout.token_of_slot, layout.slot_of_token)  # type: ignore[no-untyped-call]
    blocks = phis[0].of_pieces(phis, _pieces(slots, spec)).flatten(0, 1)
    blocks = cast(Tensor, _Rearrange.apply(blocks, layout.piece_of_block, layout.block_of_piece))  # type: ignore[no-untyped-call]
    return blocks.unflatten(0, (len(phis), -1)).unbind()


def compress_pieces(phis: Sequence[Compression], pieces_MBPGdD: Tensor) -> tuple[Tensor, ...]:
    """As `compress_together`, for the pieces of whole sequences: no block ends behind the last piece."""
    return phis[0].of_pieces(phis, pieces_MBPGdD).unbind()


class MeanCompression(Compression):
    """φ = mean of the block."""

    @staticmethod
    def of_pieces(phis: Sequence[MeanCompression], pieces_MBPGdD: Tensor) -> Tensor:
        spec = phis[0].spec
        means, blocks = pieces_MBPGdD.float().mean(dim=4), _blocks_of(pieces_MBPGdD, spec)
        shifted = [means[:, :, m : m + blocks] for m in range(spec.pieces_per_compressed)]
        return torch.stack(shifted).mean(dim=0).to(pieces_MBPGdD.dtype)


class LearnedCompression(Compression):
    """φ = MLP over the block's tokens with an embedding of their offset in the block, shared by the groups."""

    def __init__(self, spec: NSASpec, dim: int) -> None:
        super().__init__(spec)
        self.place = nn.Parameter(torch.zeros(spec.l, dim))  # the offset embedding; checkpoints hold it by this name
        self.hidden = nn.Linear(spec.l * dim, dim)
        self.out = nn.Linear(dim, dim)

    @staticmethod
    def of_pieces(phis: Sequence[LearnedCompression], pieces_MBPGdD: Tensor) -> Tensor:
        spec, (count, batch, _, groups, _, dim) = phis[0].spec, pieces_MBPGdD.shape
        per_block, blocks = spec.pieces_per_compressed, _blocks_of(pieces_MBPGdD, spec)
        first = torch.stack([phi.hidden.weight for phi in phis])
        # The product of the offset embedding and the first matrix is a constant, so it joins the bias.
        of_places = (first * torch.stack([phi.place.flatten() for phi in phis])[:, None]).sum(-1)
        bias = torch.stack([phi.hidden.bias for phi in phis]) + of_places
        by_offset = first.view(count, dim, per_block, spec.d * dim).transpose(1, 2).flatten(1, 2)
        partial = torch.bmm(pieces_MBPGdD.reshape(count, -1, spec.d * dim), by_offset.mT)
        partial = partial.view(count, batch, -1, groups, per_block, dim)
        total = sum(partial[:, :, m : m + blocks, :, m] for m in range(per_block))
        hidden = F.silu(total + bias[:, None, None, None]).flatten(1, 3)
        out = torch.bmm(hidden, torch.stack([phi.out.weight for phi in phis]).mT)
        out = out + torch.stack([phi.out.bias for phi in phis])[:, None].to(out.dtype)
        return out.view(count, batch, blocks, groups, dim)


class _Rearrange(torch.autograd.Function):
    """`x[:, index]` with the gradient `d[:, inverse]`, 0 where that is −1: a sum over repeats would be slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[:, index]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        exists = (inverse >= 0).view(-1, *[1] * (d_out.dim() - 2))
        return d_out[:, inverse.clamp_min(0)].where(exists, 0), None, None


def _pieces(x_BSMGD: Tensor, spec: NSASpec) -> Tensor:
    """Return `[M,B,P,G,d,D]`: the stride-d pieces that some whole block covers."""
    blocks = spec.compressed_blocks(x_BSMGD.shape[1])
    pieces = blocks + spec.pieces_per_compressed - 1 if blocks else 0
    return x_BSMGD[:, : pieces * spec.d].unflatten(1, (pieces, spec.d)).permute(3, 0, 1, 4, 2, 5)


def _blocks_of(pieces_MBPGdD: Tensor, spec: NSASpec) -> int:
    return max(0, pieces_MBPGdD.shape[2] - spec.pieces_per_compressed + 1)
