"""Triton: attention where each query sees one run of keys, forward and backward; both dense branches are of this kind.

Key `n` ends at position `n·STRIDE + L − 1` and is visible from there on, and with a window only to the `W` tokens that
follow: the compressed branch is (L=l, STRIDE=d, no window), the window branch (L=1, STRIDE=1, W=w).

Here the kernels with queries outside, forward and dq; `banded_keys` has dk and dv. Keys are walked in one loop; the few
tiles at the edges, which not every row sees whole, are masked under a branch.

The first query stands at position `start`, for a tile of a sequence whose keys are cached. A kernel that gets None for
it is compiled without it: training pays nothing.

Shapes: B batch, S tokens, H heads, G groups, R = H/G, D head dim, N keys; `BM` rows and `BN` keys in a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.banded import dkv as banded_keys
from tamis.attention.kernels.banded.band import Band, Rows
from tamis.attention.kernels.banded.tiles import (
    described_keys,
    key_tiles,
    load_keys,
    load_rows,
    place,
    rows_from,
    visible,
)
from tamis.attention.kernels.launch import LOG2E, copies_tiles, padded, precision, tile_for, unit_last_stride
from tamis.attention.kernels.start import read_start, start_argument


@triton.jit
def _softmax_step(s, v, m, total, acc, scale, PRECISION: tl.constexpr):
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return m_new, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["S", "N", "G", "start"])
def _forward_kernel(
    q, k, v, out, lse,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    S, N, G, start, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, sequence, g = place(tl.cdiv(S * R, BM), G)
    b = sequence.to(tl.int64)
    t0, away, r, alive = rows_from(tile * BM, S, R, BM)
    token = tl.minimum(t0 + away, S - 1)
    q += b * stride_qb + g * R * stride_qh
    q_tile = load_rows(q, t0, away, r, alive, stride_qs, stride_qh, D, DP, True)
    if not COPIED:
        k += b * stride_kb + g * stride_kg
        v += b * stride_vb + g * stride_vg

    t_first, t_last = tile * BM // R, tl.minimum((tile * BM + BM - 1) // R, S - 1)
    position = token
    if start is not None:
        start = read_start(start)
        t_first, t_last, position = t_first + start, t_last + start, position + start
    begin, tiles, whole_first, whole_end = key_tiles(t_first, t_last, L, STRIDE, W, BN)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in tl.range(0, tiles, num_stages=STAGES):
        first = begin + j * BN
        k_tile = load_keys(k, sequence, g, first, N, stride_kn, D, DP, BN, COPIED)
        v_tile = load_keys(v, sequence, g, first, N, stride_vn, D, DP, BN, COPIED)
        k_turned = tl.trans(k_tile)
        if (not COPIED) or j < tiles:  # always: see `banded_tiles`
            s = tl.dot(q_tile, k_turned, input_precision=PRECISION)
            if (j < whole_first) | (j >= whole_end):
                seen = visible(position[:, None], first + tl.arange(0, BN)[None, :], L, STRIDE, W)
                s = tl.where(seen, s, float("-inf"))
            m, total, acc = _softmax_step(s, v_tile, m, total, acc, scale, PRECISION)

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    column = tl.arange(0, DP)
    row = (b * S + token) * (G * R) + g * R + r
    mask = alive[:, None] & (column < D)[None, :]
    tl.store(out + row[:, None] * D + column[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    natural = tl.where(empty, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)  # ln 2
    tl.store(lse + (b * G * R + g * R + r) * S + token, natural, mask=alive)


@triton.jit
def _add_dq(
    q, dout, dq, k, v, lse, gate, delta, sequence, g, first_row, row, alive, t_first, t_last, token,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, N, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What one branch adds to the gradient of a tile of queries, not yet times the softmax's scale."""
    lse2 = tl.load(lse + first_row + row, mask=alive, other=float("inf")) * 1.4426950408889634
    delta_row = tl.load(delta + first_row + row, mask=alive, other=0.0)
    gate_row = tl.load(gate + first_row + row, mask=alive, other=0.0)
    begin, tiles, whole_first, whole_end = key_tiles(t_first, t_last, L, STRIDE, W, BN)
    if not COPIED:
        k += sequence.to(tl.int64) * stride_kb + g * stride_kg
        v += sequence.to(tl.int64) * stride_vb + g * stride_vg
    for j in tl.range(0, tiles, num_stages=STAGES):
        first = begin + j * BN
        k_tile = load_keys(k, sequence, g, first, N, stride_kn, D, DP, BN, COPIED)
        v_tile = load_keys(v, sequence, g, first, N, stride_vn, D, DP, BN, COPIED)
        k_turned, v_turned = tl.trans(k_tile), tl.trans(v_tile)
        if (not COPIED) or j < tiles:  # always: see `banded_tiles`
            s = tl.dot(q, k_turned, input_precision=PRECISION)
            dp = tl.dot(dout, v_turned, input_precision=PRECISION)
            p = tl.exp2(s * scale - lse2[:, None])
            if (j < whole_first) | (j >= whole_end):
                seen = visible(token[:, None], first + tl.arange(0, BN)[None, :], L, STRIDE, W)
                p = tl.where(seen, p, 0.0)
            ds = p * (dp * gate_row[:, None] - delta_row[:, None])
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["S", "G", "N", "N2"])
def _dq_kernel(
    q, dout, dq, k, v, lse, gate, delta, k2, v2, lse2, gate2, delta2,
    stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, N,
    stride_kb2, stride_kn2, stride_kg2, stride_vb2, stride_vn2, stride_vg2, N2,
    S, G, softmax_scale, scale,
    ACCUMULATE: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    L2: tl.constexpr, STRIDE2: tl.constexpr, W2: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one branch, or of two (`k2` is not None): queries and gradients are read once, and dq is rounded once."""
    tile, sequence, g = place(tl.cdiv(S * R, BM), G)
    b = sequence.to(tl.int64)
    t0, away, r, alive = rows_from(tile * BM, S, R, BM)
    token, head = tl.minimum(t0 + away, S - 1), g * R + r
    q_tile = load_rows(q + b * stride_qb, t0, away, head, alive, stride_qs, stride_qh, D, DP, True)
    dout_tile = load_rows(dout + b * stride_ob, t0, away, head, alive, stride_os, stride_oh, D, DP, True)
    first_row, row = (b * G + g) * R * S + t0, r * S + away
    t_first, t_last = tile * BM // R, tl.minimum((tile * BM + BM - 1) // R, S - 1)
    column = tl.arange(0, DP)
    mask = alive[:, None] & (column < D)[None, :]
    address = dq + ((b * S + token) * (G * R) + head)[:, None] * D + column[None, :]
    acc = tl.zeros([BM, DP], tl.float32)
    if ACCUMULATE:  # read here, beside queries and gradients: at the end everything would wait for it
        acc += tl.load(address, mask=mask, other=0.0).to(tl.float32) * (1.0 / softmax_scale)
    acc = _add_dq(
        q_tile, dout_tile, acc, k, v, lse, gate, delta, sequence, g, first_row, row, alive,
        t_first, t_last, token, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, N, scale,
        L, STRIDE, W, D, DP, BN, PRECISION, COPIED, STAGES,
    )  # fmt: skip
    if k2 is not None:
        acc = _add_dq(
            q_tile, dout_tile, acc, k2, v2, lse2, gate2, delta2, sequence, g, first_row, row, alive,
            t_first, t_last, token, stride_kb2, stride_kn2, stride_kg2, stride_vb2, stride_vn2, stride_vg2, N2, scale,
            L2, STRIDE2, W2, D, DP, BN, PRECISION, COPIED, STAGES,
        )  # fmt: skip

    tl.store(address, (acc * softmax_scale).to(dq.dtype.element_ty), mask=mask)


def forward(q: Tensor, band: Band, start: int = 0) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and natural log-sum-exp `[B,H,S]`; 0 and −inf for a row that sees no key.

    The first query stands at position `start`, counted from the first key.
    """
    q = unit_last_stride(q)
    B, S, H, D = q.shape
    N, G = band.k.shape[1:3]
    R, copied = H // G, copies_tiles(H // G, band.k, band.v)
    tile = tile_for("forward", q, copied)
    out = torch.empty(B, S, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    _forward_kernel[(triton.cdiv(S * R, tile.rows) * B * G,)](
        q, *(described_keys(x, tile.keys, copied) for x in (band.k, band.v)), out, lse,
        *q.stride()[:3], *band.strides, S, N, G, start_argument(start), D**-0.5 * LOG2E,
        L=band.length, STRIDE=band.stride, W=band.window, R=R, D=D, DP=padded(D), PRECISION=precision(q.dtype),
        BM=tile.rows, BN=tile.keys, COPIED=copied, STAGES=tile.stages, **tile.options,
    )  # fmt: skip
    return out, lse


def query_gradient(
    q: Tensor,
    dout: Tensor,
    dq: Tensor,
    accumulate: bool,
    first: tuple[Band, Rows],
    second: tuple[Band, Rows] | None = None,
) -> None:
    """Write `dq` of one branch or two, or add to it. `dout` is the mixed output's gradient, not yet times any gate."""
    q, dout = unit_last_stride(q), unit_last_stride(dout)
    B, S, H, D = q.shape
    branches = [first] if second is None else [first, second]
    G = first[0].k.shape[2]
    R, scale = H // G, D**-0.5
    copied = all(copies_tiles(R, band.k, band.v) for band, _ in branches)
    tile = tile_for("dq", q, copied)
    tensors: list[object] = []
    numbers: list[int | None] = []
    for band, rows in branches:
        tensors += [*(described_keys(x, tile.keys, copied) for x in (band.k, band.v)), rows.lse, rows.gate, rows.delta]
        numbers += [*band.strides, band.k.shape[1]]
    if second is None:
        tensors, numbers = tensors + [None] * 5, numbers + [None] * 7
    one, two = branches[0][0], branches[-1][0]
    _dq_kernel[(triton.cdiv(S * R, tile.rows) * B * G,)](
        q, dout, dq, *tensors, *q.stride()[:3], *dout.stride()[:3], *numbers, S, G, scale, scale * LOG2E,
        ACCUMULATE=accumulate, L=one.length, STRIDE=one.stride, W=one.window,
        L2=two.length, STRIDE2=two.stride, W2=two.window, R=R, D=D, DP=padded(D),
        PRECISION=precision(q.dtype), BM=tile.rows, BN=tile.keys, COPIED=copied, STAGES=tile.stages, **tile.options,
    )  # fmt: skip


def backward(q: Tensor, band: Band, rows: Rows, dout: Tensor, dq: Tensor, accumulate_dq: bool) -> tuple[Tensor, Tensor]:
    """(dk, dv) of one branch; `dq` is written, or added to."""
    query_gradient(q, dout, dq, accumulate_dq, (band, rows))
    return banded_keys.gradients(q, band, rows, dout)
