"""The SwiGLU feed-forward layer, and `silu(gate) · up` over the merged product `[gate | up]` as one Triton kernel.

The backward kernel writes the gradients of both halves in one pass; torch.compile would compute each half twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

# Narrow tiles leave few lanes idle at the end of a row whose width is no power of two.
TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_and_up(x)))


def swiglu(merged: Tensor) -> Tensor:
    """Return `silu(gate) · up` of `[…, 2·width]` as `[…, width]`."""
    if merged.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return swiglu_rows(merged.flatten(0, -2)).unflatten(0, merged.shape[:-1])  # saves the custom op's host time
    if merged.is_cuda:
        return _swiglu(merged.flatten(0, -2)).unflatten(0, merged.shape[:-1])
    gate, up = merged.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_rows(merged_TW: Tensor) -> Tensor:
    merged_TW = merged_TW.contiguous()
    out = merged_TW.new_empty(merged_TW.shape[0], merged_TW.shape[1] // 2)
    _forward_kernel[_grid(out)](merged_TW, out, *out.shape, **TILE)
    return out


@torch.library.custom_op("tamis::swiglu", mutates_args=())
def _swiglu(merged_TW: Tensor) -> Tensor:
    return swiglu_rows(merged_TW)


@torch.library.custom_op("tamis::swiglu_backward", mutates_args=())
def swiglu_rows_backward(d_out: Tensor, merged_TW: Tensor) -> Tensor:
    d_out, merged_TW = d_out.contiguous(), merged_TW.contiguous()
    d_merged = torch.empty_like(merged_TW)
    _backward_kernel[_grid(d_out)](merged_TW, d_out, d_merged, *d_out.shape, **TILE)
    return d_merged


@_swiglu.register_fake
def _(merged_TW: Tensor) -> Tensor:
    return merged_TW.new_empty(merged_TW.shape[0], merged_TW.shape[1] // 2)


@swiglu_rows_backward.register_fake
def _(d_out: Tensor, merged_TW: Tensor) -> Tensor:
    return torch.empty_like(merged_TW, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, d_out: Tensor) -> Tensor:
    return swiglu_rows_backward(d_out, ctx.saved_tensors[0])


_swiglu.register_autograd(_backward, setup_context=_setup_context)


def _grid(out: Tensor) -> tuple[int]:
    return (triton.cdiv(out.shape[0], TILE["ROWS"]) * triton.cdiv(out.shape[1], TILE["COLUMNS"]),)


@triton.jit
def _load_halves(merged, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's rows and columns, their mask, and both halves in float32."""
    tiles = tl.cdiv(width, COLUMNS)
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS  # 64 bits: rows × width exceeds 2^31
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
