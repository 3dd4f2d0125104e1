"""Triton: SwiGLU over rows of `[gate | up]`, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Narrow tiles: few lanes beyond the end of a row whose width is no power of two.
TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}


def swiglu_rows(merged_TW: Tensor) -> Tensor:
    merged_TW = merged_TW.contiguous()
    out = merged_TW.new_empty(merged_TW.shape[0], merged_TW.shape[1] // 2)
    _forward_kernel[_grid(out)](merged_TW, out, *out.shape, **TILE)
    return out


def swiglu_rows_backward(d_out: Tensor, merged_TW: Tensor) -> Tensor:
    d_out, merged_TW = d_out.contiguous(), merged_TW.contiguous()
    d_merged = torch.empty_like(merged_TW)
    _backward_kernel[_grid(d_out)](merged_TW, d_out, d_merged, *d_out.shape, **TILE)
    return d_merged


def _grid(out: Tensor) -> tuple[int]:
    return (triton.cdiv(out.shape[0], TILE["ROWS"]) * triton.cdiv(out.shape[1], TILE["COLUMNS"]),)


@triton.jit
def _load_halves(merged, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile: its rows and columns, their mask, and both halves in float32."""
    tiles = tl.cdiv(width, COLUMNS)
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS  # 64 bits: rows × width passes 2^31
    row = first + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    base = merged + row * 2 * width + column
    gate = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(base + width, mask=inside, other=0.0).to(tl.float32)
    return row, column, inside, gate, up


@triton.jit
def _forward_kernel(merged, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column, inside, gate, up = _load_halves(merged, rows, width, ROWS, COLUMNS)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(merged, d_out, d_merged, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column, inside, gate, up = _load_halves(merged, rows, width, ROWS, COLUMNS)
    d = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    base = d_merged + row * 2 * width + column
    tl.store(base, d_gate.to(d_merged.dtype.element_ty), mask=inside)
    tl.store(base + width, (d * gate * sigmoid).to(d_merged.dtype.element_ty), mask=inside)
