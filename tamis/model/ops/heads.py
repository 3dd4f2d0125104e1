"""The heads of a merged projection as the tensors attention takes, those that carry positions turned by them.

Cut and turned in one pass over memory, and joined again in one on the way back; a compiler takes three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_heads(merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: list[int], turned: list[bool]) -> list[Tensor]:
    """Parts of `sizes` heads of tokens at positions 0 … S−1; those to be `turned` are, by tables `[length, D/2]`."""
    if merged_BSCD.is_cuda:
        return _split_heads(merged_BSCD, cos, sin, sizes, turned)
    parts, S = merged_BSCD.split(sizes, dim=2), merged_BSCD.shape[1]
    return [turn(part, cos[:S], sin[:S]) if is_turned else part for part, is_turned in zip(parts, turned, strict=True)]


def turn(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Pairs (i, i + D/2) of every head turned by the angles of their positions."""
    cos, sin = cos_SD[:, None], sin_SD[:, None]
    first, second = x_BSHD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


@torch.library.custom_op("tamis::split_heads", mutates_args=())
def _split_heads(merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: list[int], turned: list[bool]) -> list[Tensor]:
    from tamis.model.ops.heads_kernel import split_heads_rows

    return split_heads_rows(merged_BSCD, cos, sin, sizes, turned)


@torch.library.custom_op("tamis::join_heads", mutates_args=())
def _join_heads(d_parts: list[Tensor], cos: Tensor, sin: Tensor, turned: list[bool]) -> Tensor:
    from tamis.model.ops.heads_kernel import join_heads_rows

    return join_heads_rows(d_parts, cos, sin, turned)


@_split_heads.register_fake
def _(merged_BSCD: Tensor, cos: Tensor, sin: Tensor, sizes: list[int], turned: list[bool]) -> list[Tensor]:
    B, S, _, D = merged_BSCD.shape
    return [merged_BSCD.new_empty(B, S, size, D) for size in sizes]


@_join_heads.register_fake
def _(d_parts: list[Tensor], cos: Tensor, sin: Tensor, turned: list[bool]) -> Tensor:
    B, S, _, D = d_parts[0].shape
    return d_parts[0].new_empty(B, S, sum(part.shape[2] for part in d_parts), D)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, cos, sin, _, ctx.turned = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, d_parts: list[Tensor]) -> tuple[Tensor, None, None, None, None]:
    return _join_heads(d_parts, *ctx.saved_tensors, ctx.turned), None, None, None, None


_split_heads.register_autograd(_backward, setup_context=_keep)
