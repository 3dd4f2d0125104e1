"""Rotary positions, and the cut of a merged projection into heads, with those that carry positions rotated.

On a GPU `split_heads` cuts and rotates in one pass over memory, and joins the gradients in another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.packing import PackedRow


class Rotary(nn.Module):
    """Tables of cosines and sines for positions 0 … length−1, applied per head to pairs (i, i + D/2)."""

    def __init__(self, dim: int, base: float, scale: float, length: int) -> None:
        super().__init__()
        if not (0 < base < math.inf and 0 < scale < math.inf):
            raise ValueError(f"rope_base and rope_scale must be finite numbers above 0, got {base} and {scale}")
        # float64: at a million tokens a float32 angle is wrong by hundredths of a radian.
        frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64) / scale, frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def tables(self, row: PackedRow | None = None) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of a row's tokens; positions restart at every packed document."""
        if row is None:
            return self.cos, self.sin
        positions = row.positions()
        return self.cos[positions], self.sin[positions]

    def forward(self, x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
        return rotate(x_BSHD, self.cos[positions_S], self.sin[positions_S])


def rotate(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of every head by the angles of their positions."""
    cos, sin = cos_SD[:, None], sin_SD[:, None]
    first, second = x_BSHD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def normalise_heads(heads_BSCD: Tensor, *counts: int) -> Tensor:
    """Divide heads by their root mean square (QK-norm); `counts` heads in turn are divided and left as they are.

    With counts 4, 2, 2 the first four heads are divided, two are not, the next two are, and the rest is not.
    """
    parts = heads_BSCD.split([*counts, heads_BSCD.shape[2] - sum(counts)], dim=2)
    return torch.cat([part if i % 2 else unit_rms(part) for i, part in enumerate(parts)], dim=2)


def unit_rms(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)


def split_heads(
    merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: list[int], rotated: list[bool], piece: int = 0
) -> list[Tensor]:
    """Cut C heads into parts of `sizes` heads, and rotate those marked in `rotated`.

    Token `s` is rotated by row `s` of the tables `[S or more, D/2]`. With `piece`, which divides S, the second part
    comes as `compress_pieces` takes it: `[2,B,S/piece,G,piece,D]`, where its heads are 2·G.
    """
    if merged_BSCD.is_cuda:
        return _split_heads(merged_BSCD, cos, sin, sizes, rotated, piece)
    parts, S = list(merged_BSCD.split(sizes, dim=2)), merged_BSCD.shape[1]
    parts = [rotate(part, cos[:S], sin[:S]) if r else part for part, r in zip(parts, rotated, strict=True)]
    if piece:
        parts[1] = parts[1].unflatten(1, (-1, piece)).unflatten(3, (2, -1)).permute(3, 0, 1, 4, 2, 5)
    return parts


def empty_parts(merged_BSCD: Tensor, sizes: Sequence[int], piece: int) -> list[Tensor]:
    """Return the memory of the parts."""
    B, S, _, D = merged_BSCD.shape
    shapes: list[tuple[int, ...]] = [(B, S, size, D) for size in sizes]
    if piece:
        shapes[1] = (2, B, S // piece, sizes[1] // 2, piece, D)
    return [merged_BSCD.new_empty(shape) for shape in shapes]


@torch.library.custom_op("tamis::split_heads", mutates_args=())
def _split_heads(
    merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: list[int], rotated: list[bool], piece: int
) -> list[Tensor]:
    from tamis.attention.kernels.split_heads import (
        split_heads_rows,  # here, because a machine without a GPU may lack Triton
    )

    return split_heads_rows(merged_BSCD, cos, sin, sizes, rotated, piece)


@torch.library.custom_op("tamis::join_heads", mutates_args=())
def _join_heads(
    d_parts: list[Tensor], cos: Tensor, sin: Tensor, sizes: list[int], rotated: list[bool], piece: int
) -> Tensor:
    from tamis.attention.kernels.split_heads import join_heads_rows

    return join_heads_rows(d_parts, cos, sin, sizes, rotated, piece)


@_split_heads.register_fake
def _(merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: list[int], rotated: list[bool], piece: int) -> list[Tensor]:
    return empty_parts(merged_BSCD, sizes, piece)


@_join_heads.register_fake
def _(d_parts: list[Tensor], cos: Tensor, sin: Tensor, sizes: list[int], rotated: list[bool], piece: int) -> Tensor:
    B, S, _, D = d_parts[0].shape
    return d_parts[0].new_empty(B, S, sum(sizes), D)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, cos, sin, *ctx.parts = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, d_parts: list[Tensor]) -> tuple[Tensor, None, None, None, None, None]:
    return _join_heads(d_parts, *ctx.saved_tensors, *ctx.parts), None, None, None, None, None


_split_heads.register_autograd(_backward, setup_context=_setup_context)
