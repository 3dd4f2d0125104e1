"""Sliding-window attention alone as a torch operation: the kernels of the window branch, with every gate 1."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.banded.keys import key_gradients
from tamis.attention.kernels.banded.queries import Band, Rows, banded_forward
from tamis.attention.kernels.banded.query_gradients import write_query_gradient
from tamis.attention.kernels.launch import cdiv, padded, softmax_scale, unit_last_stride
from tamis.attention.packing import PackedRow

ROWS = 64  # per program


def sliding_window(q: Tensor, k: Tensor, v: Tensor, window: int, row: PackedRow | None = None) -> Tensor:
    """Causal attention `[B,S,H,D]` of every query over the newest `window` keys, its own included."""
    return cast(Tensor, _window_forward(q, k, v, window, None if row is None else row.flat)[0])


def _band(k: Tensor, v: Tensor, window: int, table: Tensor | None) -> Band:
    return Band(unit_last_stride(k), unit_last_stride(v), 1, 1, window, softmax_scale(k, None), table, table)


@torch.library.custom_op("tamis::window_forward", mutates_args=())
def _window_forward(q: Tensor, k: Tensor, v: Tensor, window: int, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp `[B,H,S]`; `table` begins with the `PackedTables.token` of packed documents."""
    return banded_forward(q, _band(k, v, window, table))


@_window_forward.register_fake
def _(q, k, v, window, table):  # type: ignore[no-untyped-def]
    B, S, H, _ = q.shape
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((B, H, S), dtype=torch.float32)


@torch.library.custom_op("tamis::window_backward", mutates_args=())
def _window_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    band, rows = _band(k, v, window, table), Rows(lse, torch.ones_like(lse), _row_products(dout.contiguous(), out))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    write_query_gradient(q, dout, dq, band.scale, [(band, rows)])
    return dq, *key_gradients(q, band, rows, dout)


@_window_backward.register_fake
def _(dout, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window, table = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, table)


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, table = ctx.saved_tensors
    return *_window_backward(dout, *tensors, ctx.window, table), None, None


_window_forward.register_autograd(_gradients, setup_context=_save)


def _row_products(a_BSHD: Tensor, b_BSHD: Tensor) -> Tensor:
    """The product of every row with its counterpart, summed, `[B,H,S]` float32; both contiguous."""
    B, S, H, D = a_BSHD.shape
    products = torch.empty(B, H, S, dtype=torch.float32, device=a_BSHD.device)
    grid = (cdiv(B * S * H, ROWS),)
    _row_products_kernel[grid](a_BSHD, b_BSHD, products, B * S * H, S, H, D=D, DP=padded(D), ROWS=ROWS)
    return products


@triton.jit
def _row_products_kernel(a, b, products, rows, S, H, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    at = row[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    total = tl.sum(tl.load(a + at, mask=mask, other=0.0).to(tl.float32) * tl.load(b + at, mask=mask, other=0.0), 1)
    token, head = row // H, row % H
    tl.store(products + (token // S * H + head) * S + token % S, total, mask=row < rows)
