"""Triton: attention where each query sees one run of keys, forward and backward; both dense branches are of this kind.

Key `n` ends at position `n·STRIDE + L − 1` and is visible from there on, and with a window only to the `W` tokens that
follow: the compressed branch is (L=l, STRIDE=d, no window), the window branch (L=1, STRIDE=1, W=w).

Here the kernels with queries outside, forward and dq; `banded_keys` has dk and dv. Keys are walked in tiles that every
row sees whole (no mask), then the few at the edges.

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

from tamis.attention import banded_keys
from tamis.attention.banded_tiles import described_keys, key_tiles, load_keys, load_rows, rows_from, visible
from tamis.attention.start import read_start, start_argument
from tamis.attention.tiles import LOG2E, copies_tiles, padded, precision, tile_for, unit_last_stride


@triton.jit
def _softmax_step(
    q, k, v, b, g, first, N, token, m, total, acc, scale, stride_kn, stride_vn,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, COPIED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_tile = load_keys(k, b, g, first, N, stride_kn, D, DP, BN, MASKED, COPIED)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    if MASKED:
        s = tl.where(visible(token[:, None], first + tl.arange(0, BN)[None, :], L, STRIDE, W), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(s * scale - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    v_tile = load_keys(v, b, g, first, N, stride_vn, D, DP, BN, MASKED, COPIED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
    return m_new, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["B", "S", "N", "G", "start"])
def _forward_kernel(
    q, k, v, out, lse,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    B, S, N, G, start, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    tile = tl.cdiv(S * R, BM) - 1 - tl.program_id(0) // (B * G)  # the last tokens see the most keys: longest first
    bg = tl.program_id(0) % (B * G)
    sequence, g = bg // G, bg % G
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
    begin, tiles, whole_first, whole_end, count = key_tiles(t_first, t_last, L, STRIDE, W, BN, TAIL, COPIED)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in range(whole_first, whole_end):
        m, total, acc = _softmax_step(
            q_tile, k, v, sequence, g, begin + j * BN, N, position, m, total, acc, scale, stride_kn, stride_vn,
            L, STRIDE, W, D, DP, BN, PRECISION, COPIED, False,
        )  # fmt: skip
    for e in range(tiles - (whole_end - whole_first)):
        j = tl.where(e < whole_first, e, e + whole_end - whole_first)
        m, total, acc = _softmax_step(
            q_tile, k, v, sequence, g, begin + j * BN, N, position, m, total, acc, scale, stride_kn, stride_vn,
            L, STRIDE, W, D, DP, BN, PRECISION, COPIED, True,
        )  # fmt: skip
    if TAIL > 0:
        for first in range(tiles * BN, count, TAIL):
            m, total, acc = _softmax_step(
                q_tile, k, v, sequence, g, begin + first, N, position, m, total, acc, scale, stride_kn, stride_vn,
                L, STRIDE, W, D, DP, TAIL, PRECISION, COPIED, True,
            )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    column = tl.arange(0, DP)
    row = (b * S + token) * (G * R) + g * R + r
    mask = alive[:, None] & (column < D)[None, :]
    tl.store(out + row[:, None] * D + column[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    natural = tl.where(empty, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)  # ln 2
    tl.store(lse + (b * G * R + g * R + r) * S + token, natural, mask=alive)


@triton.jit
def _dq_step(
    q, dout, k, v, b, g, first, N, token, lse2, gate, delta, dq, scale, stride_kn, stride_vn,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, COPIED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_tile = load_keys(k, b, g, first, N, stride_kn, D, DP, BN, MASKED, COPIED)
    v_tile = load_keys(v, b, g, first, N, stride_vn, D, DP, BN, MASKED, COPIED)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dout, tl.trans(v_tile), input_precision=PRECISION)
    p = tl.exp2(s * scale - lse2[:, None])
    if MASKED:
        p = tl.where(visible(token[:, None], first + tl.arange(0, BN)[None, :], L, STRIDE, W), p, 0.0)
    ds = p * (dp * gate[:, None] - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["B", "S", "N", "G"])
def _dq_kernel(
    q, k, v, lse, dout, gate, delta, dq,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_ob, stride_os, stride_oh, B, S, N, G, softmax_scale, scale,
    ACCUMULATE: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    tile = tl.cdiv(S * R, BM) - 1 - tl.program_id(0) // (B * G)
    bg = tl.program_id(0) % (B * G)
    sequence, g = bg // G, bg % G
    b = sequence.to(tl.int64)
    t0, away, r, alive = rows_from(tile * BM, S, R, BM)
    token, head = tl.minimum(t0 + away, S - 1), g * R + r
    q_tile = load_rows(q + b * stride_qb, t0, away, head, alive, stride_qs, stride_qh, D, DP, True)
    dout_tile = load_rows(dout + b * stride_ob, t0, away, head, alive, stride_os, stride_oh, D, DP, True)
    scalar = (b * G * R + head) * S + token
    lse2 = tl.load(lse + scalar, mask=alive, other=float("inf")) * 1.4426950408889634
    delta_row = tl.load(delta + scalar, mask=alive, other=0.0)
    row = (b * S + token) * (G * R) + head
    gate_row = tl.load(gate + scalar, mask=alive, other=0.0)
    if not COPIED:
        k += b * stride_kb + g * stride_kg
        v += b * stride_vb + g * stride_vg

    t_first, t_last = tile * BM // R, tl.minimum((tile * BM + BM - 1) // R, S - 1)
    begin, tiles, whole_first, whole_end, _ = key_tiles(t_first, t_last, L, STRIDE, W, BN, 0, COPIED)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in range(whole_first, whole_end):
        acc = _dq_step(
            q_tile, dout_tile, k, v, sequence, g, begin + j * BN, N, token, lse2, gate_row, delta_row, acc, scale,
            stride_kn, stride_vn, L, STRIDE, W, D, DP, BN, PRECISION, COPIED, False,
        )  # fmt: skip
    for e in range(tiles - (whole_end - whole_first)):
        j = tl.where(e < whole_first, e, e + whole_end - whole_first)
        acc = _dq_step(
            q_tile, dout_tile, k, v, sequence, g, begin + j * BN, N, token, lse2, gate_row, delta_row, acc, scale,
            stride_kn, stride_vn, L, STRIDE, W, D, DP, BN, PRECISION, COPIED, True,
        )  # fmt: skip

    column = tl.arange(0, DP)
    mask = alive[:, None] & (column < D)[None, :]
    address = dq + row[:, None] * D + column[None, :]
    acc *= softmax_scale
    if ACCUMULATE:
        acc += tl.load(address, mask=mask, other=0.0).to(tl.float32)
    tl.store(address, acc.to(dq.dtype.element_ty), mask=mask)


def forward(
    q: Tensor, k: Tensor, v: Tensor, length: int, stride: int, window: int, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and natural log-sum-exp `[B,H,S]`; 0 and −inf for a row that sees no key.

    The first query stands at position `start`, counted from the first key.
    """
    q, k, v = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v)
    B, S, H, D = q.shape
    N, G = k.shape[1], k.shape[2]
    copied = copies_tiles(H // G, k, v)
    tile = tile_for("forward", q, copied)
    out = torch.empty(B, S, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    _forward_kernel[(triton.cdiv(S * (H // G), tile.rows) * B * G,)](
        q, *(described_keys(x, tile.keys, copied) for x in (k, v)), out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], B, S, N, G, start_argument(start), D**-0.5 * LOG2E,
        L=length, STRIDE=stride, W=window, R=H // G, D=D, DP=padded(D), PRECISION=precision(q.dtype),
        BM=tile.rows, BN=tile.keys, TAIL=tile.tail if window and not copied else 0, COPIED=copied, **tile.options,
    )  # fmt: skip
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dout: Tensor,
    gate: Tensor,
    delta: Tensor,
    dq: Tensor,
    accumulate_dq: bool,
    length: int,
    stride: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """(dk, dv); `dq` is written, or added to. `dout` is the mixed output's gradient, not yet times this branch's gate.

    `lse`, `gate` and `delta = gate·<dout, out>` are `[B,H,S]` float32: half-precision numbers one by one cannot be read
    ahead, and would stall every step.
    """
    q, k, v, dout = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), unit_last_stride(dout)
    B, S, H, D = q.shape
    N, G = k.shape[1], k.shape[2]
    R, scale = H // G, D**-0.5
    copied = copies_tiles(R, k, v)
    tile = tile_for("dq", q, copied)
    _dq_kernel[(triton.cdiv(S * R, tile.rows) * B * G,)](
        q, *(described_keys(x, tile.keys, copied) for x in (k, v)), lse, dout, gate, delta, dq,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], B, S, N, G, scale, scale * LOG2E,
        ACCUMULATE=accumulate_dq, L=length, STRIDE=stride, W=window, R=R, D=D, DP=padded(D),
        PRECISION=precision(q.dtype), BM=tile.rows, BN=tile.keys, COPIED=copied, **tile.options,
    )  # fmt: skip
    return banded_keys.gradients(q, k, v, lse, dout, gate, delta, length, stride, window)
