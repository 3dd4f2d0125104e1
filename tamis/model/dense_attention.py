"""Causal attention of the dense twin: PyTorch's, with cuDNN's gradients of long sequences computed in pieces.

Under a causal mask cuDNN's backward pass runs at 425 TFLOP/s, without one at 445 to 460 (H200, heads of 64 elements).
And most of a long sequence needs no mask: every query of its second half sees every key of its first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WHOLE = 16384  # up to this length a sequence's gradients are computed at once: its halves would gain next to nothing

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v
Backward = Callable[..., Gradients]  # of dout, q, k, v, out, lse and whether under the mask


def causal_attention(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, may_use_cudnn: bool) -> Tensor:
    """Every query over the keys up to its own, `[B,S,H,D]`; which kernel computes it is PyTorch's choice otherwise."""
    if may_use_cudnn and _gains_by_halves(q_BSHD):
        return _long_attention(q_BSHD, k_BSGD, v_BSGD)[0]
    q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BSGD, v_BSGD))
    if not takes_groups(q):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def takes_groups(q: Tensor) -> bool:
    """Whether PyTorch has a fast kernel for them: in float32 a GPU has none, and every score would be stored."""
    return not (q.is_cuda and q.dtype is torch.float32)


def _gains_by_halves(q_BSHD: Tensor) -> bool:
    """Measured on Hopper alone; cuDNN takes half precision and heads of up to 128 elements, in eights."""
    S, D = q_BSHD.shape[1], q_BSHD.shape[-1]
    if not q_BSHD.is_cuda or q_BSHD.element_size() != 2 or D > 128 or D % 8:
        return False
    return S > WHOLE and S % 2 == 0 and torch.cuda.get_device_properties(q_BSHD.device).major == 9


def gradients_by_halves(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHS1: Tensor, backward: Backward
) -> Gradients:
    """The causal triangle of long sequences as small triangles, and squares of ever longer halves without a mask.

    With the outputs and log-sum-exps of whole rows, every piece gives its share of the gradients, and shares add up.
    """
    length, halved = q.shape[1], []
    while length > WHOLE and length % 2 == 0:
        halved.append(length)
        length //= 2
    triangles = [_cut(x, length) for x in (dout, q, k, v, out)]
    of_triangles = backward(*triangles, _cut_rows(lse_BHS1, length), True)
    dq, dk, dv = (d.reshape(x.shape) for d, x in zip(of_triangles, (q, k, v), strict=True))
    for length in halved:
        early, late = slice(length // 2), slice(length // 2, length)
        dout_late, q_late, out_late = (_cut(x, length)[:, late] for x in (dout, q, out))
        k_early, v_early = (_cut(x, length)[:, early] for x in (k, v))
        lse_late = _cut_rows(lse_BHS1, length)[:, :, late]
        shares = backward(dout_late, q_late, k_early, v_early, out_late, lse_late, False)
        for whole, share, half in zip((dq, dk, dv), shares, (late, early, early), strict=True):
            _cut(whole, length)[:, half] += share
    return dq, dk, dv


def _cut(x_BSHD: Tensor, length: int) -> Tensor:
    """Sequences as several shorter ones, `[B · S/length, length, H, D]`, in the same memory."""
    return x_BSHD.view(-1, length, *x_BSHD.shape[2:])


def _cut_rows(lse_BHS1: Tensor, length: int) -> Tensor:
    return lse_BHS1.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHS1: Tensor, is_causal: bool
) -> Gradients:
    turned = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    unused = lse_BHS1.new_zeros(1, dtype=torch.int64)  # the seed and offset of a dropout that there is not
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *turned, lse_BHS1.contiguous(), unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, is_causal
    )
    dq, dk, dv = (d.transpose(1, 2) for d in gradients)
    return dq, dk, dv


@torch.library.custom_op("tamis::long_attention", mutates_args=())
def _long_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    turned = (t.transpose(1, 2) for t in (q, k, v))
    out, lse_BHS1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*turned, None, True, 0.0, True)
    return out.transpose(1, 2).contiguous(), lse_BHS1


@torch.library.custom_op("tamis::long_attention_backward", mutates_args=())
def _long_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHS1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # One layout for all: cuDNN's plans are remembered by those of q, k and v, and dout's must not differ another time.
    dout, q, k, v = (t.contiguous() for t in (dout, q, k, v))
    return gradients_by_halves(dout, q, k, v, out, lse_BHS1, _cudnn_backward)


@_long_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, S, 1, dtype=torch.float32)


@_long_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHS1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return _long_attention_backward(dout, *ctx.saved_tensors)


_long_attention.register_autograd(_backward, setup_context=_keep)
