"""Triton: the gates. Forward, `out = Σ gate·branch`; backward, the gates' gradients and each `gate·<dout, branch>`.

Forward, the last kernel does it where it has the registers: that of the selected branch, or of the window where that
runs last. It holds one of the three branches. Backward, and elsewhere, kernels of their own read every tensor once,
bound by memory. Rows are (batch, token, head).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.checks import check_contiguous, check_like, check_queries
from tamis.attention.kernels.launch import PreparedKernel, cdiv, padded, unit_last_stride
from tamis.attention.kernels.tape import empty

ELEMENTS = 4096  # per program, forward
# Backward, a tile is a few heads of many tokens: what each row leaves behind, [H,S], is then written in runs of tokens.
HEADS_OF_DELTA = 4
ELEMENTS_OF_DELTA = 8192


NOT_MIXED = (None,) * 4  # the arguments of a kernel that does not mix


class Mixture(NamedTuple):
    """The mixed output, and what it is computed from together with the selected branch.

    All are contiguous: gates `[B,S,H,3]`, the others `[B,S,H,D]`. `wait` is called before the first launch that uses
    them.
    """

    out: Tensor
    gates: Tensor
    cmp: Tensor
    win: Tensor
    wait: Callable[[], None]


@PreparedKernel
@triton.jit
def _mix_kernel(mixed, gates, cmp, win, sel, rows, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BD)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    values = tl.load(sel + row[:, None] * D + column[None, :], mask=mask, other=0.0)
    store_mixture(mixed, gates, cmp, win, values, row, row < rows, D, BD)


def mix(mixture: Mixture, sel: Tensor) -> None:
    """Write the mixed output by a kernel of its own."""
    D = sel.shape[3]
    rows, tile = sel.numel() // D, max(1, ELEMENTS // padded(D))
    arguments = *mixture_arguments(mixture), sel, rows
    _mix_kernel[(cdiv(rows, tile),)](*arguments, D=D, BD=padded(D), ROWS=tile, num_warps=4)


def mixture_arguments(mixture: Mixture | None) -> tuple[Tensor | None, ...]:
    """The first arguments of `store_mixture`; None for a kernel that does not mix."""
    if mixture is None:
        return NOT_MIXED
    mixture.wait()
    return mixture[:4]


@triton.jit
def store_mixture(mixed, gates, cmp, win, sel, row, live, D: tl.constexpr, BD: tl.constexpr):
    """Store `Σ gate·branch` of rows, if there is a mixture; `sel` is rounded as it is stored."""
    if mixed is not None:
        column = tl.arange(0, BD)
        mask = live[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        acc = _gate_of(gates, 0, row, live) * tl.load(cmp + at, mask=mask, other=0.0).to(tl.float32)
        acc += _gate_of(gates, 1, row, live) * sel.to(mixed.dtype.element_ty).to(tl.float32)
        acc += _gate_of(gates, 2, row, live) * tl.load(win + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(mixed + at, acc.to(mixed.dtype.element_ty), mask=mask)


@triton.jit
def _gate_of(gates, branch, row, live):
    return tl.load(gates + row * 3 + branch, mask=live, other=0.0).to(tl.float32)[:, None]


@PreparedKernel
@triton.jit
def _delta_kernel(
    dout, cmp, sel, win, gates, dgates, weights, delta, stride_ob, stride_os, stride_oh, S, H, plane,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BM // HEADS
    column = tl.arange(0, DP)
    parts, tiles = H // HEADS, tl.cdiv(S, TOKENS)
    s = (tl.program_id(0) // parts % tiles).to(tl.int64) * TOKENS + tl.arange(0, BM) // HEADS  # S·H·D may pass 2^31
    h = tl.program_id(0) % parts * HEADS + tl.arange(0, BM) % HEADS
    b = (tl.program_id(0) // parts // tiles).to(tl.int64)
    alive = s < S
    row = (b * S + s) * H + h
    mask = alive[:, None] & (column < D)[None, :]
    at_dout = (b * stride_ob + s * stride_os + h * stride_oh)[:, None] + column[None, :]
    grad = tl.load(dout + at_dout, mask=mask, other=0.0).to(tl.float32)
    for branch in tl.static_range(3):
        source = cmp if branch == 0 else (sel if branch == 1 else win)
        value = tl.load(source + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        product = tl.sum(grad * value, 1)
        gate = tl.load(gates + row * 3 + branch, mask=alive, other=0.0).to(tl.float32)
        tl.store(dgates + row * 3 + branch, product.to(dgates.dtype.element_ty), mask=alive)
        at_scalar = branch * plane + (b * H + h) * S + s
        tl.store(weights + at_scalar, gate, mask=alive)
        tl.store(delta + at_scalar, gate * product, mask=alive)


def mix_backward(
    dout: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor, trusted: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dgates `[B,S,H,3]`; and for the branches' kernels the gates and `gate·<dout, branch>`, `[3,B,H,S]` float32."""
    if not trusted:
        _check(cmp, sel, win, gates)
        check_like("cmp", cmp, dout=(dout, tuple(cmp.shape)))
    dgates, planes = gate_gradients(unit_last_stride(dout), cmp, sel, win, gates)
    weights, delta = weights_and_delta(planes, *cmp.shape[:3])
    return dgates, weights, delta


def gate_gradients(dout: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """dgates, and the memory of what `weights_and_delta` returns; dout has unit stride in its last dimension."""
    B, S, H, D = cmp.shape
    heads = gcd(H, HEADS_OF_DELTA)
    block = max(heads, ELEMENTS_OF_DELTA // padded(D) * heads // HEADS_OF_DELTA)
    dgates = empty(gates.shape, gates.dtype, gates.device)
    planes = empty(planes_shape(B, S, H), torch.float32, cmp.device)
    weights, delta = planes
    _delta_kernel[(H // heads * cdiv(S, block // heads) * B,)](
        dout, cmp, sel, win, gates, dgates, weights, delta, *dout.stride()[:3], S, H, planes.shape[2],
        D=D, DP=padded(D), BM=block, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return dgates, planes


def planes_shape(batch: int, tokens: int, heads: int) -> tuple[int, int, int]:
    """Each branch's part begins at a multiple of 16 bytes, where a copy may begin."""
    rows = batch * tokens * heads
    return 2, 3, rows + -rows % 4


def weights_and_delta(planes: Tensor, batch: int, tokens: int, heads: int) -> tuple[Tensor, ...]:
    """Gates and `gate·<dout, branch>`, `[3,B,H,S]` each."""
    plane = planes.shape[2]
    shape = 2, 3, batch, heads, tokens
    return planes.as_strided(shape, (3 * plane, plane, heads * tokens, tokens, 1)).unbind()


def _check(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> None:
    check_queries(cmp, "cmp")
    shape = tuple(cmp.shape)
    check_like("cmp", cmp, sel=(sel, shape), win=(win, shape), gates=(gates, (*shape[:3], 3)))
    check_contiguous(cmp=cmp, sel=sel, win=win, gates=gates)
