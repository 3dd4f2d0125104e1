"""The residual stream's addition and the RMS norm that always follows it, in one operation: one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_and_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + branch`, and the norm of what the sum is rounded to."""
    total, normed, _ = _add_and_norm(x.flatten(0, -2), branch.flatten(0, -2), weight, eps)
    return total.view_as(x), normed.view_as(x)


@torch.library.custom_op("tamis::add_and_norm", mutates_args=())
def _add_and_norm(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from tamis.model.ops.norm_kernel import add_and_norm_rows

    return add_and_norm_rows(x_TE, branch_TE, weight_E, eps)


@torch.library.custom_op("tamis::add_and_norm_backward", mutates_args=())
def _add_and_norm_backward(
    d_total: Tensor | None, d_normed: Tensor, total_TE: Tensor, inverse_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    from tamis.model.ops.norm_kernel import add_and_norm_rows_backward

    return add_and_norm_rows_backward(d_total, d_normed, total_TE, inverse_T, weight_E)


@_add_and_norm.register_fake
def _(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    return total, torch.empty_like(total), x_TE.new_empty(x_TE.shape[0], dtype=torch.float32)


@_add_and_norm_backward.register_fake
def _(
    d_total: Tensor | None, d_normed: Tensor, total_TE: Tensor, inverse_T: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total_TE), torch.empty_like(weight_E)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[0], output[2], inputs[2])
    ctx.set_materialize_grads(False)  # behind the last norm nobody uses the sum


def _backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
    d_x, d_weight = _add_and_norm_backward(d_total, d_normed, *ctx.saved_tensors)
    return d_x, d_x, d_weight, None


_add_and_norm.register_autograd(_backward, setup_context=_keep)
