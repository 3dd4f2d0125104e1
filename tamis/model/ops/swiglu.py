"""`silu(gate) · up` over the merged product `[gate | up]`, with a backward that writes both halves in one pass.

A compiler that sees the halves joined again computes each of them twice; on a GPU one Triton kernel does it once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(merged: Tensor) -> Tensor:
    """`[…, 2·width]` to `[…, width]`."""
    if merged.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        from tamis.model.ops.swiglu_kernel import swiglu_rows

        return swiglu_rows(merged.flatten(0, -2)).unflatten(0, merged.shape[:-1])  # without the cost of an operation
    if merged.is_cuda:
        return _swiglu(merged.flatten(0, -2)).unflatten(0, merged.shape[:-1])
    gate, up = merged.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op("tamis::swiglu", mutates_args=())
def _swiglu(merged_TW: Tensor) -> Tensor:
    from tamis.model.ops.swiglu_kernel import swiglu_rows

    return swiglu_rows(merged_TW)


@torch.library.custom_op("tamis::swiglu_backward", mutates_args=())
def _swiglu_backward(d_out: Tensor, merged_TW: Tensor) -> Tensor:
    from tamis.model.ops.swiglu_kernel import swiglu_rows_backward

    return swiglu_rows_backward(d_out, merged_TW)


@_swiglu.register_fake
def _(merged_TW: Tensor) -> Tensor:
    return merged_TW.new_empty(merged_TW.shape[0], merged_TW.shape[1] // 2)


@_swiglu_backward.register_fake
def _(d_out: Tensor, merged_TW: Tensor) -> Tensor:
    return torch.empty_like(merged_TW, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, d_out: Tensor) -> Tensor:
    return _swiglu_backward(d_out, ctx.saved_tensors[0])


_swiglu.register_autograd(_backward, setup_context=_keep)
