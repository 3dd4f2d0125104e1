"""φ compresses every block of `l` keys (or values), one each `d` tokens, into a single one.

A block is `l/d` pieces of `d` tokens, shared with its neighbours. The first matrix is applied to each piece once for
each offset the piece may have in a block; the results are shifted and added. No overlapping copy is made. Blocks of
packed documents (`layout`) begin anywhere in the row, so their tokens are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.packing import CompressedLayout
from tamis.attention.spec import NSASpec


class MeanCompression(nn.Module):
    """φ = mean of the block."""

    def __init__(self, spec: NSASpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x_BSGD: Tensor, layout: CompressedLayout | None = None) -> Tensor:
        """Return `[B,N,G,D]`, one per block."""
        if layout is not None:
            return _gather(x_BSGD, layout, self.spec).float().mean(dim=2).to(x_BSGD.dtype)
        pieces = _pieces(x_BSGD, self.spec).float().mean(dim=2)  # [B, P, G, D]
        per_block = self.spec.pieces_per_compressed
        blocks = self.spec.compressed_blocks(x_BSGD.shape[1])
        return torch.stack([pieces[:, m : m + blocks] for m in range(per_block)]).mean(dim=0).to(x_BSGD.dtype)


class LearnedCompression(nn.Module):
    """φ = MLP over the block's tokens with an embedding of their offset in the block, shared by the groups."""

    def __init__(self, spec: NSASpec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.place = nn.Parameter(torch.zeros(spec.l, dim))  # the offset embedding; checkpoints hold it by this name
        self.hidden = nn.Linear(spec.l * dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BSGD: Tensor, layout: CompressedLayout | None = None) -> Tensor:
        """Return `[B,N,G,D]`, one per block."""
        spec, dim = self.spec, x_BSGD.shape[-1]
        per_block, blocks = spec.pieces_per_compressed, spec.compressed_blocks(x_BSGD.shape[1])
        weight = self.hidden.weight.view(dim, per_block, spec.d * dim)
        # The product of the offset embedding and the first matrix is a constant, so it joins the bias.
        bias = self.hidden.bias + self.hidden.weight @ self.place.flatten()
        if layout is not None:
            blocks_BNGK = _gather(x_BSGD, layout, spec).transpose(2, 3).flatten(3)  # [B, N, G, l·D]
            return self.out(F.silu(F.linear(blocks_BNGK, self.hidden.weight, bias)))
        pieces = _pieces(x_BSGD, spec).transpose(2, 3).flatten(3)  # [B, P, G, d·D]
        partial = F.linear(pieces, weight.permute(1, 0, 2).reshape(per_block * dim, -1)).unflatten(-1, (per_block, dim))
        total = sum(partial[:, m : m + blocks, :, m] for m in range(per_block))
        return self.out(F.silu(total + bias))


def _gather(x_BSGD: Tensor, layout: CompressedLayout, spec: NSASpec) -> Tensor:
    """Return `[B, N, l, G, D]`: the tokens of every block of a packed row."""
    return x_BSGD[:, layout.first_token[:, None] + torch.arange(spec.l, device=x_BSGD.device)]


def _pieces(x_BSGD: Tensor, spec: NSASpec) -> Tensor:
    """Return `[B, P, d, G, D]`: the stride-d pieces that some whole block covers."""
    blocks = spec.compressed_blocks(x_BSGD.shape[1])
    pieces = blocks + spec.pieces_per_compressed - 1 if blocks else 0
    return x_BSGD[:, : pieces * spec.d].unflatten(1, (pieces, spec.d))
