"""Triton: the residual stream's addition and its RMS norm in one pass, forward and backward.

A warp holds a row, so that nothing is exchanged between warps. The weight's gradient is summed row by row in registers,
then over the programs in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_OF_A_WARP = 1024
ROWS_PER_PROGRAM = 8  # of the backward at least, so that a small batch leaves few sums to add
MOST_PROGRAMS = 16 * 132  # of one warp: sixteen on each multiprocessor of an H200


def add_and_norm_rows(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x + branch`, its norm times the weight, and the inverse of its root mean square."""
    x_TE, branch_TE = x_TE.contiguous(), branch_TE.contiguous()
    rows, dim = x_TE.shape
    total, normed = torch.empty_like(x_TE), torch.empty_like(x_TE)
    inverse = torch.empty(rows, dtype=torch.float32, device=x_TE.device)
    _norm_kernel[(rows,)](x_TE, branch_TE, weight_E, total, normed, inverse, eps, **_row(dim))
    return total, normed, inverse


def add_and_norm_rows_backward(
    d_total: Tensor | None, d_normed: Tensor, total_TE: Tensor, inverse_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of `x` and of `branch`, which is one and the same, and that of the weight."""
    rows, dim = total_TE.shape
    programs = min(MOST_PROGRAMS, triton.cdiv(rows, ROWS_PER_PROGRAM))
    d_x = torch.empty_like(total_TE)
    d_weight = torch.empty(programs, dim, dtype=torch.float32, device=d_x.device)
    d_normed = d_normed.contiguous()
    d_total = d_normed if (missing := d_total is None) else d_total.contiguous()
    _norm_backward_kernel[(programs,)](
        d_total, d_normed, total_TE, inverse_T, weight_E, d_x, d_weight, rows, HAS_D_TOTAL=not missing, **_row(dim)
    )
    return d_x, d_weight.sum(dim=0).to(weight_E.dtype)


def _row(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "num_warps": min(8, max(1, block // ROW_OF_A_WARP))}


@triton.jit
def _norm_kernel(x, branch, weight, total, normed, inverse, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows × width passes 2^31
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    place = row * DIM + column
    both = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    value = rounded.to(tl.float32)  # of what the stream holds from here on
    scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    tl.store(inverse + row, scale)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, (value * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    d_total,
    d_normed,
    total,
    inverse,
    weight,
    d_x,
    d_weight,
    rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_D_TOTAL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * DIM + column
        scale = tl.load(inverse + row)
        unit = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * scale
        d = tl.load(d_normed + place, mask=inside, other=0.0).to(tl.float32)
        straight = tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32) if HAS_D_TOTAL else 0.0
        of_weight += d * unit
        d *= w
        d = scale * (d - unit * (tl.sum(d * unit, 0) / DIM)) + straight
        tl.store(d_x + place, d.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * DIM + column, of_weight, mask=inside)
