"""Triton: cut the heads of a merged projection into parts and rotate them by position; join their gradients.

A row is one head of one token; a part holds the rows of its heads alone. Every number is read once and written once.
With PIECE, the second part holds keys and values as φ takes them, `[2,B,P,G,PIECE,D]`: P pieces of PIECE tokens, and of
each the tokens of one head together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import cdiv, next_power_of_2
from tamis.attention.rotary import empty_parts

WARPS = 4
ROWS = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 32}  # per program; with 64, float16 spills registers


def split_heads_rows(
    merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: Sequence[int], rotated: Sequence[bool], piece: int = 0
) -> list[Tensor]:
    parts = empty_parts(merged_BSCD, sizes, piece)
    _launch(_split_kernel, merged_BSCD.contiguous(), parts, cos, sin, sizes, rotated, piece)
    return parts


def join_heads_rows(
    d_parts: Sequence[Tensor], cos: Tensor, sin: Tensor, sizes: Sequence[int], rotated: Sequence[bool], piece: int = 0
) -> Tensor:
    """Return the gradient of the merged heads from the gradients of the parts."""
    B, S, _, D = d_parts[0].shape
    d_merged = d_parts[0].new_empty(B, S, sum(sizes), D)
    _launch(_join_kernel, d_merged, [part.contiguous() for part in d_parts], cos, sin, sizes, rotated, piece)
    return d_merged


def _launch(
    kernel: Any, merged_BSCD: Tensor, parts: Sequence[Tensor], cos: Tensor, sin: Tensor, sizes: Sequence[int],
    rotated: Sequence[bool], piece: int,
) -> None:  # fmt: skip
    B, S, C, D = merged_BSCD.shape
    rows, tile = B * S * C, ROWS[merged_BSCD.dtype]
    # Of every row of every part. Triton from 3.8 on does not derive it where an address is chosen by a condition.
    aligned = gcd(16, D * merged_BSCD.element_size(), *(part.data_ptr() for part in parts))
    kernel[(cdiv(rows, tile),)](
        merged_BSCD,
        tuple(parts),
        cos,
        sin,
        rows,
        S,
        SIZES=tuple(sizes),
        ROTATED=tuple(rotated),
        HEADS=C,
        HALF=D // 2,
        WIDTH=next_power_of_2(D // 2),
        ROWS=tile,
        ALIGNED=aligned,
        PIECE=piece,
        num_warps=WARPS,
    )


@triton.jit
def _rows(rows, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each row's first offset, token and head, the columns of a half, and the mask of what exists."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    start = row.to(tl.int64) * (2 * HALF)  # 64 bits: rows × dim exceeds 2^31
    return start, row // HEADS, row % HEADS, column, (row < rows) & (column < HALF)


@triton.jit
def _angles(  # type: ignore[no-untyped-def]
    cos, sin, token, head, S, column, inside, SIZES: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr
):
    """Return the cosines and sines of each row; 1 and 0 for a head that is not rotated."""
    is_rotated = head < 0
    first = 0
    for part in tl.static_range(len(SIZES)):
        if ROTATED[part]:
            is_rotated |= (head >= first) & (head < first + SIZES[part])
        first += SIZES[part]
    offset = (token % S) * HALF + column
    return (
        tl.load(cos + offset, mask=inside & is_rotated, other=1.0),
        tl.load(sin + offset, mask=inside & is_rotated, other=0.0),
    )


@triton.jit
def _rows_of_parts(  # type: ignore[no-untyped-def]
    parts, token, head, tokens, SIZES: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr
):
    """Return where each row begins in its part: one address to read or write, not one of every part with a mask."""
    at = parts[0] + (token * SIZES[0] + head).to(tl.int64) * (2 * HALF)
    first = SIZES[0]
    for part in tl.static_range(1, len(SIZES)):
        row = token * SIZES[part] + head - first
        if PIECE > 0 and part == 1:
            GROUPS: tl.constexpr = SIZES[1] // 2
            stack, group = (head - first) // GROUPS, (head - first) % GROUPS
            pieces = stack * (tokens // PIECE) + token // PIECE
            row = (pieces * GROUPS + group) * PIECE + token % PIECE
        at = tl.where(head >= first, parts[part] + row.to(tl.int64) * (2 * HALF), at)
        first += SIZES[part]
    return tl.multiple_of(at, (ALIGNED, ALIGNED))  # bytes


@triton.jit
def _split_kernel(  # type: ignore[no-untyped-def]
    merged, parts, cos, sin, rows, S, SIZES: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    start, token, head, column, inside = _rows(rows, HEADS, HALF, WIDTH, ROWS)
    a = tl.load(merged + start + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(merged + start + column + HALF, mask=inside, other=0.0).to(tl.float32)
    c, s = _angles(cos, sin, token, head, S, column, inside, SIZES, ROTATED, HALF)
    target = _rows_of_parts(parts, token, head, rows // HEADS, SIZES, HALF, ALIGNED, PIECE) + column
    tl.store(target, (a * c - b * s).to(merged.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (b * c + a * s).to(merged.dtype.element_ty), mask=inside)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    merged, parts, cos, sin, rows, S, SIZES: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    start, token, head, column, inside = _rows(rows, HEADS, HALF, WIDTH, ROWS)
    source = _rows_of_parts(parts, token, head, rows // HEADS, SIZES, HALF, ALIGNED, PIECE) + column
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    c, s = _angles(cos, sin, token, head, S, column, inside, SIZES, ROTATED, HALF)
    tl.store(merged + start + column, (a * c + b * s).to(merged.dtype.element_ty), mask=inside)
    tl.store(merged + start + column + HALF, (b * c - a * s).to(merged.dtype.element_ty), mask=inside)
