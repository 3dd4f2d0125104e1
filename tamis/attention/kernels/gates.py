"""Triton: the gates. Forward, `out = Σ gate·branch`; backward, the gates' gradients and each `gate·<dout, branch>`.

Both kernels read every tensor once and are bound by memory. Their rows are (batch, token, head).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.checks import check_contiguous, check_like, check_queries
from tamis.attention.kernels.launch import PreparedKernel, cdiv, padded, unit_last_stride
from tamis.attention.kernels.tape import empty

ELEMENTS = 4096  # per program
# Backward, a tile is a few heads of many tokens: what each row leaves behind, [H,S], is then written in runs of tokens.
HEADS_OF_DELTA = 4
ELEMENTS_OF_DELTA = 8192


@PreparedKernel
@triton.jit
def _mix_kernel(cmp, sel, win, gates, out, rows, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, DP)
    alive = row < rows
    at = row[:, None] * D + column[None, :]
    mask = alive[:, None] & (column < D)[None, :]
    acc = tl.zeros([BM, DP], tl.float32)
    for branch in tl.static_range(3):
        source = cmp if branch == 0 else (sel if branch == 1 else win)
        gate = tl.load(gates + row * 3 + branch, mask=alive, other=0.0).to(tl.float32)
        acc += gate[:, None] * tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


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


def mix_forward(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor, trusted: bool = False) -> Tensor:
    """`Σ gate·branch`; branches `[B,S,H,D]` and gates `[B,S,H,3]`, all contiguous."""
    if not trusted:
        _check(cmp, sel, win, gates)
    D = cmp.shape[3]
    rows, block = cmp.numel() // D, max(1, ELEMENTS // padded(D))
    out = empty(cmp.shape, cmp.dtype, cmp.device)
    _mix_kernel[(cdiv(rows, block),)](cmp, sel, win, gates, out, rows, D=D, DP=padded(D), BM=block, num_warps=4)
    return out


def mix_backward(
    dout: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor, trusted: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dgates `[B,S,H,3]`; and for the branches' kernels the gates and `gate·<dout, branch>`, `[3,B,H,S]` float32."""
    if not trusted:
        _check(cmp, sel, win, gates)
        check_like("cmp", cmp, dout=(dout, tuple(cmp.shape)))
    dout = unit_last_stride(dout)
    B, S, H, D = cmp.shape
    heads, rows = gcd(H, HEADS_OF_DELTA), B * S * H
    plane = rows + -rows % 4  # each branch's begins at a multiple of 16 bytes, where a copy may begin
    block = max(heads, ELEMENTS_OF_DELTA // padded(D) * heads // HEADS_OF_DELTA)
    dgates = empty(gates.shape, gates.dtype, gates.device)
    planes = empty((2, 3, plane), torch.float32, cmp.device)
    weights, delta = planes.as_strided((2, 3, B, H, S), (3 * plane, plane, H * S, S, 1)).unbind()
    _delta_kernel[(H // heads * cdiv(S, block // heads) * B,)](
        dout, cmp, sel, win, gates, dgates, weights, delta, *dout.stride()[:3], S, H, plane,
        D=D, DP=padded(D), BM=block, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return dgates, weights, delta


def _check(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> None:
    check_queries(cmp, "cmp")
    shape = tuple(cmp.shape)
    check_like("cmp", cmp, sel=(sel, shape), win=(win, shape), gates=(gates, (*shape[:3], 3)))
    check_contiguous(cmp=cmp, sel=sel, win=win, gates=gates)
