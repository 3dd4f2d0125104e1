"""RMS norm, alone or fused with the residual addition before it; the fused form has a Triton kernel for GPUs.

One warp holds a row, so warps exchange nothing. The weight's gradient is summed row by row in registers, then over the
programs in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

ELEMENTS_PER_WARP = 1024
MIN_ROWS_PER_PROGRAM = 8  # in the backward pass, so that a small batch leaves few partial sums
MAX_PROGRAMS = 16 * 132  # of one warp: sixteen on each multiprocessor of an H200


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)  # one launch, in float32 inside
        # In float32 whatever the compute dtype: squares of bf16 activations lose too much precision.
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x + branch` and its norm; on a GPU in one pass over memory."""
        if x.is_cuda:
            return add_and_norm(x, branch, self.weight, self.eps)
        x = x + branch
        return x, self(x)


def add_and_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + branch`, rounded to the dtype of `x`, and the norm of the rounded sum."""
    total, normed, _ = add_and_norm_rows(x.flatten(0, -2), branch.flatten(0, -2), weight, eps)
    return total.view_as(x), normed.view_as(x)


@torch.library.custom_op("tamis::add_and_norm", mutates_args=())
def add_and_norm_rows(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x + branch`, its norm times the weight, and the inverse of its root mean square."""
    x_TE, branch_TE = x_TE.contiguous(), branch_TE.contiguous()
    rows, dim = x_TE.shape
    total, normed = torch.empty_like(x_TE), torch.empty_like(x_TE)
    inverse = torch.empty(rows, dtype=torch.float32, device=x_TE.device)
    _norm_kernel[(rows,)](x_TE, branch_TE, weight_E, total, normed, inverse, eps, **_row(dim))
    return total, normed, inverse


@torch.library.custom_op("tamis::add_and_norm_backward", mutates_args=())
def add_and_norm_rows_backward(
    d_total: Tensor | None, d_normed: Tensor, total_TE: Tensor, inverse_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient shared by `x` and `branch`, and the weight's gradient."""
    rows, dim = total_TE.shape
    programs = min(MAX_PROGRAMS, triton.cdiv(rows, MIN_ROWS_PER_PROGRAM))
    d_x = torch.empty_like(total_TE)
    d_weight = torch.empty(programs, dim, dtype=torch.float32, device=d_x.device)
    d_normed = d_normed.contiguous()
    d_total = d_normed if (missing := d_total is None) else d_total.contiguous()
    _norm_backward_kernel[(programs,)](
        d_total, d_normed, total_TE, inverse_T, weight_E, d_x, d_weight, rows, HAS_D_TOTAL=not missing, **_row(dim)
    )
    return d_x, d_weight.sum(dim=0).to(weight_E.dtype)


@add_and_norm_rows.register_fake
def _(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    return total, torch.empty_like(total), x_TE.new_empty(x_TE.shape[0], dtype=torch.float32)


@add_and_norm_rows_backward.register_fake
def _(
    d_total: Tensor | None, d_normed: Tensor, total_TE: Tensor, inverse_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total_TE), torch.empty_like(weight_E)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[0], output[2], inputs[2])
    ctx.set_materialize_grads(False)  # the sum behind the last norm is unused and has no gradient


def _backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
    d_x, d_weight = add_and_norm_rows_backward(d_total, d_normed, *ctx.saved_tensors)
    return d_x, d_x, d_weight, None


add_and_norm_rows.register_autograd(_backward, setup_context=_setup_context)


def _row(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "num_warps": min(8, max(1, block // ELEMENTS_PER_WARP))}


@triton.jit
def _norm_kernel(x, branch, weight, total, normed, inverse, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows × width exceeds 2^31
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    offset = row * DIM + column
    both = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(branch + offset, mask=inside, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + offset, rounded, mask=inside)
    value = rounded.to(tl.float32)  # the norm is of the rounded sum, which is what later layers read
    scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    tl.store(inverse + row, scale)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offset, (value * scale * w).to(normed.dtype.element_ty), mask=inside)


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
    weight_gradient = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * DIM + column
        scale = tl.load(inverse + row)
        unit = tl.load(total + offset, mask=inside, other=0.0).to(tl.float32) * scale
        d = tl.load(d_normed + offset, mask=inside, other=0.0).to(tl.float32)
        straight = tl.load(d_total + offset, mask=inside, other=0.0).to(tl.float32) if HAS_D_TOTAL else 0.0
        weight_gradient += d * unit
        d *= w
        d = scale * (d - unit * (tl.sum(d * unit, 0) / DIM)) + straight
        tl.store(d_x + offset, d.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * DIM + column, weight_gradient, mask=inside)
