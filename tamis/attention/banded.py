"""Triton: attention where each query sees one run of keys, forward and backward; both dense branches are of this kind.

Key `n` ends at position `n·STRIDE + L − 1` and is visible from there on, and with a window only to the `W` tokens that
follow: the compressed branch is (L=l, STRIDE=d, no window), the window branch (L=1, STRIDE=1, W=w).

Rows of a tile are (token, head of the group) pairs, token by token: one tile of keys serves every head of the group and
no group size is padded. Keys are walked in tiles that every row sees whole (no mask), then the few at the edges.

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

from tamis.attention.tiles import LOG2E, padded, precision, tile_for, unit_last_stride

PROGRAMS_WANTED = 1024  # the key-outer kernel splits its rows until there are about so many programs
MOST_SPLITS = 16  # each split holds float32 copies of dk and dv until they are summed


@triton.jit
def _keys_begun(token, W: tl.constexpr):
    """First key the token's window holds."""
    return tl.maximum(token - W + 1, 0) if W > 0 else token * 0


@triton.jit
def _keys_ended(token, L: tl.constexpr, STRIDE: tl.constexpr):
    """Keys that end at or before the token."""
    return tl.maximum((token + 1 - L + STRIDE) // STRIDE, 0)


@triton.jit
def _visible(token, key, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    seen = key < _keys_ended(token, L, STRIDE)
    if W > 0:
        seen = seen & (key >= _keys_begun(token, W))
    return seen


@triton.jit
def _key_tiles(t_first, t_last, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, BN: tl.constexpr):
    """The keys of tokens t_first…t_last as tiles from `begin`: how many, and which of them every token sees whole."""
    begin = _keys_begun(t_first, W)
    tiles = tl.cdiv(_keys_ended(t_last, L, STRIDE) - begin, BN)
    whole_first = tl.cdiv(_keys_begun(t_last, W) - begin, BN)
    whole_end = tl.maximum((_keys_ended(t_first, L, STRIDE) - begin) // BN, whole_first)
    return begin, tiles, whole_first, whole_end


@triton.jit
def _rows(first, S, R: tl.constexpr, BM: tl.constexpr):
    """The tile's first token, then for each row its distance from it, its head of the group, and whether it exists.

    Addresses are a 64-bit place for the tile plus 32-bit distances within it: half the registers, and 1M tokens fit.
    """
    t0 = first // R
    local = first - t0 * R + tl.arange(0, BM)
    away = local // R
    return t0, away, local - away * R, away < S - t0


@triton.jit
def _load_rows(x, t0, away, head, alive, stride_s, stride_h, D: tl.constexpr, DP: tl.constexpr):
    column = tl.arange(0, DP)
    address = x + t0.to(tl.int64) * stride_s + ((away * stride_s + head * stride_h)[:, None] + column[None, :])
    mask = alive[:, None] if D == DP else alive[:, None] & (column < D)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def _load_keys(x, first, N, stride_n, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    key = tl.arange(0, BN)
    column = tl.arange(0, DP)
    address = x + first.to(tl.int64) * stride_n + (key[:, None] * stride_n + column[None, :])
    if MASKED and D == DP:
        return tl.load(address, mask=(first + key < N)[:, None], other=0.0)
    if MASKED:
        return tl.load(address, mask=(first + key < N)[:, None] & (column < D)[None, :], other=0.0)
    if D == DP:
        return tl.load(address)
    return tl.load(address, mask=(column < D)[None, :], other=0.0)


@triton.jit
def _softmax_step(
    q, k, v, first, N, token, m, total, acc, scale, stride_kn, stride_vn,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_tile = _load_keys(k, first, N, stride_kn, D, DP, BN, MASKED)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    if MASKED:
        s = tl.where(_visible(token[:, None], first + tl.arange(0, BN)[None, :], L, STRIDE, W), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(s * scale - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    v_tile = _load_keys(v, first, N, stride_vn, D, DP, BN, MASKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
    return m_new, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["B", "S", "N", "G", "start"])
def _forward_kernel(
    q, k, v, out, lse,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    B, S, N, G, start, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.cdiv(S * R, BM) - 1 - tl.program_id(0) // (B * G)  # the last tokens see the most keys: longest first
    bg = tl.program_id(0) % (B * G)
    b, g = (bg // G).to(tl.int64), bg % G
    t0, away, r, alive = _rows(tile * BM, S, R, BM)
    token = tl.minimum(t0 + away, S - 1)
    q_tile = _load_rows(q + b * stride_qb + g * R * stride_qh, t0, away, r, alive, stride_qs, stride_qh, D, DP)
    k += b * stride_kb + g * stride_kg
    v += b * stride_vb + g * stride_vg

    t_first, t_last = tile * BM // R, tl.minimum((tile * BM + BM - 1) // R, S - 1)
    position = token
    if start is not None:
        t_first, t_last, position = t_first + start, t_last + start, position + start
    begin, tiles, whole_first, whole_end = _key_tiles(t_first, t_last, L, STRIDE, W, BN)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in range(whole_first, whole_end):
        m, total, acc = _softmax_step(
            q_tile, k, v, begin + j * BN, N, position, m, total, acc, scale, stride_kn, stride_vn,
            L, STRIDE, W, D, DP, BN, PRECISION, False,
        )  # fmt: skip
    for e in range(tiles - (whole_end - whole_first)):
        j = tl.where(e < whole_first, e, e + whole_end - whole_first)
        m, total, acc = _softmax_step(
            q_tile, k, v, begin + j * BN, N, position, m, total, acc, scale, stride_kn, stride_vn,
            L, STRIDE, W, D, DP, BN, PRECISION, True,
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
    q, dout, k, v, first, N, token, lse2, gate, delta, dq, scale, stride_kn, stride_vn,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_tile = _load_keys(k, first, N, stride_kn, D, DP, BN, MASKED)
    v_tile = _load_keys(v, first, N, stride_vn, D, DP, BN, MASKED)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dout, tl.trans(v_tile), input_precision=PRECISION)
    p = tl.exp2(s * scale - lse2[:, None])
    if MASKED:
        p = tl.where(_visible(token[:, None], first + tl.arange(0, BN)[None, :], L, STRIDE, W), p, 0.0)
    ds = p * (dp * gate[:, None] - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["B", "S", "N", "G"])
def _dq_kernel(
    q, k, v, lse, dout, gate, delta, dq,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_ob, stride_os, stride_oh, B, S, N, G, softmax_scale, scale,
    ACCUMULATE: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.cdiv(S * R, BM) - 1 - tl.program_id(0) // (B * G)
    bg = tl.program_id(0) % (B * G)
    b, g = (bg // G).to(tl.int64), bg % G
    t0, away, r, alive = _rows(tile * BM, S, R, BM)
    token, head = tl.minimum(t0 + away, S - 1), g * R + r
    q_tile = _load_rows(q + b * stride_qb, t0, away, head, alive, stride_qs, stride_qh, D, DP)
    dout_tile = _load_rows(dout + b * stride_ob, t0, away, head, alive, stride_os, stride_oh, D, DP)
    scalar = (b * G * R + head) * S + token
    lse2 = tl.load(lse + scalar, mask=alive, other=float("inf")) * 1.4426950408889634
    delta_row = tl.load(delta + scalar, mask=alive, other=0.0)
    row = (b * S + token) * (G * R) + head
    gate_row = tl.load(gate + scalar, mask=alive, other=0.0)
    k += b * stride_kb + g * stride_kg
    v += b * stride_vb + g * stride_vg

    t_first, t_last = tile * BM // R, tl.minimum((tile * BM + BM - 1) // R, S - 1)
    begin, tiles, whole_first, whole_end = _key_tiles(t_first, t_last, L, STRIDE, W, BN)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in range(whole_first, whole_end):
        acc = _dq_step(
            q_tile, dout_tile, k, v, begin + j * BN, N, token, lse2, gate_row, delta_row, acc, scale,
            stride_kn, stride_vn, L, STRIDE, W, D, DP, BN, PRECISION, False,
        )  # fmt: skip
    for e in range(tiles - (whole_end - whole_first)):
        j = tl.where(e < whole_first, e, e + whole_end - whole_first)
        acc = _dq_step(
            q_tile, dout_tile, k, v, begin + j * BN, N, token, lse2, gate_row, delta_row, acc, scale,
            stride_kn, stride_vn, L, STRIDE, W, D, DP, BN, PRECISION, True,
        )  # fmt: skip

    column = tl.arange(0, DP)
    mask = alive[:, None] & (column < D)[None, :]
    address = dq + row[:, None] * D + column[None, :]
    acc *= softmax_scale
    if ACCUMULATE:
        acc += tl.load(address, mask=mask, other=0.0).to(tl.float32)
    tl.store(address, acc.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def _dkv_step(
    k, v, q, dout, lse, gate, delta, first, S, key, dk, dv, scale, stride_qs, stride_qh, stride_os, stride_oh,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    t0, away, r, alive = _rows(first, S, R, BM)
    q_tile = _load_rows(q, t0, away, r, alive, stride_qs, stride_qh, D, DP)
    dout_tile = _load_rows(dout, t0, away, r, alive, stride_os, stride_oh, D, DP)
    scalar = r * S + away
    lse2 = tl.load(lse + t0 + scalar, mask=alive, other=float("inf")) * 1.4426950408889634  # no row, no weight
    delta_row = tl.load(delta + t0 + scalar, mask=alive, other=0.0)
    gate_row = tl.load(gate + t0 + scalar, mask=alive, other=0.0)
    s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(s * scale - lse2[:, None])
    if MASKED:
        p = tl.where(_visible(t0 + away[:, None], key[None, :], L, STRIDE, W), p, 0.0)
    dp = tl.dot(dout_tile, tl.trans(v), input_precision=PRECISION)
    # Gradients are summed transposed, so that p and ds are right-hand sides and reach shared memory as they are.
    dv = tl.dot(tl.trans(dout_tile), (p * gate_row[:, None]).to(dout_tile.dtype), dv, input_precision=PRECISION)
    ds = p * (dp * gate_row[:, None] - delta_row[:, None])
    dk = tl.dot(tl.trans(q_tile), ds.to(q_tile.dtype), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["B", "S", "N", "G", "SPLITS"])
def _dkv_kernel(
    q, k, v, lse, dout, gate, delta, dk_out, dv_out,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_ob, stride_os, stride_oh, B, S, N, G, SPLITS, softmax_scale, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys from one split of the rows that see it; outputs are [SPLITS,B,N,G,D]."""
    bg = tl.program_id(0) % (B * G)
    split = tl.program_id(0) // (B * G) % SPLITS
    tile = tl.program_id(0) // (B * G) // SPLITS  # the first keys are seen by most rows: longest first
    b, g = (bg // G).to(tl.int64), bg % G
    first = tile * BN
    last = tl.minimum(first + BN, N) - 1
    k += b * stride_kb + g * stride_kg
    v += b * stride_vb + g * stride_vg
    k_tile = _load_keys(k, first, N, stride_kn, D, DP, BN, True)
    v_tile = _load_keys(v, first, N, stride_vn, D, DP, BN, True)
    q += b * stride_qb + g * R * stride_qh
    dout += b * stride_ob + g * R * stride_oh
    lse += (b * G + g) * R * S
    delta += (b * G + g) * R * S
    gate += (b * G + g) * R * S

    # Tiles of rows from the first token that sees a key; in the middle ones every row sees all keys.
    t_begin, t_end = first * STRIDE + L - 1, S
    t_whole, t_whole_end = last * STRIDE + L - 1, S
    if W > 0:
        t_end = tl.minimum(last + W, S)
        t_whole_end = tl.minimum(first + W, S)
    tiles = tl.cdiv((t_end - t_begin) * R, BM)
    whole_first = tl.minimum(tl.cdiv((t_whole - t_begin) * R, BM), tiles)
    whole_end = tl.maximum((t_whole_end - t_begin) * R // BM, whole_first)
    mine, mine_end = tiles * split // SPLITS, tiles * (split + 1) // SPLITS
    key = first + tl.arange(0, BN)
    dk = tl.zeros([DP, BN], tl.float32)
    dv = tl.zeros([DP, BN], tl.float32)
    for j in range(tl.maximum(mine, whole_first), tl.minimum(mine_end, whole_end)):
        dk, dv = _dkv_step(
            k_tile, v_tile, q, dout, lse, gate, delta, t_begin * R + j * BM, S, key, dk, dv, scale,
            stride_qs, stride_qh, stride_os, stride_oh,
            L, STRIDE, W, R, D, DP, BM, PRECISION, False,
        )  # fmt: skip
    left = tl.maximum(tl.minimum(mine_end, whole_first) - mine, 0)
    right_first = tl.maximum(mine, whole_end)
    for e in range(left + tl.maximum(mine_end - right_first, 0)):
        j = tl.where(e < left, mine + e, right_first + e - left)
        dk, dv = _dkv_step(
            k_tile, v_tile, q, dout, lse, gate, delta, t_begin * R + j * BM, S, key, dk, dv, scale,
            stride_qs, stride_qh, stride_os, stride_oh,
            L, STRIDE, W, R, D, DP, BM, PRECISION, True,
        )  # fmt: skip

    column = tl.arange(0, DP)
    at = (((split * B + b) * N + key) * G + g)[:, None] * D + column[None, :]
    mask = (key < N)[:, None] & (column < D)[None, :]
    tl.store(dk_out + at, tl.trans(dk * softmax_scale).to(dk_out.dtype.element_ty), mask=mask)
    tl.store(dv_out + at, tl.trans(dv).to(dv_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size", "SPLITS"])
def _sum_splits_kernel(dk_parts, dv_parts, dk, dv, size, SPLITS, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    dk_sum = tl.zeros([BLOCK], tl.float32)
    dv_sum = tl.zeros([BLOCK], tl.float32)
    for _ in range(SPLITS):  # always in this order, so that the bits repeat
        dk_sum += tl.load(dk_parts + index, mask=mask, other=0.0)
        dv_sum += tl.load(dv_parts + index, mask=mask, other=0.0)
        dk_parts += size
        dv_parts += size
    tl.store(dk + index, dk_sum.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + index, dv_sum.to(dv.dtype.element_ty), mask=mask)


def forward(
    q: Tensor, k: Tensor, v: Tensor, length: int, stride: int, window: int, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and natural log-sum-exp `[B,H,S]`; 0 and −inf for a row that sees no key.

    The first query stands at position `start`, counted from the first key.
    """
    q, k, v = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v)
    B, S, H, D = q.shape
    N, G = k.shape[1], k.shape[2]
    tile = tile_for("forward", q)
    out = torch.empty(B, S, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    _forward_kernel[(triton.cdiv(S * (H // G), tile.rows) * B * G,)](
        q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        B, S, N, G, start or None, D**-0.5 * LOG2E,
        L=length, STRIDE=stride, W=window, R=H // G, D=D, DP=padded(D), PRECISION=precision(q.dtype),
        BM=tile.rows, BN=tile.keys, **tile.options,
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
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    geometry: dict[str, int | str] = {"L": length, "STRIDE": stride, "W": window, "R": R, "D": D, "DP": padded(D)}
    geometry["PRECISION"] = precision(q.dtype)

    tile = tile_for("dq", q)
    _dq_kernel[(triton.cdiv(S * R, tile.rows) * B * G,)](
        q, k, v, lse, dout, gate, delta, dq, *strides, B, S, N, G, scale, scale * LOG2E,
        ACCUMULATE=accumulate_dq, **geometry, BM=tile.rows, BN=tile.keys, **tile.options,
    )  # fmt: skip
    dk, dv = (torch.empty(B, N, G, D, dtype=k.dtype, device=k.device) for _ in range(2))
    if N == 0:
        return dk, dv
    tile = tile_for("dkv", q)
    key_tiles = triton.cdiv(N, tile.keys) * B * G
    splits = 1 if window else max(1, min(MOST_SPLITS, PROGRAMS_WANTED // key_tiles))
    parts = [dk, dv]
    if splits > 1:
        parts = [torch.empty(splits, *dk.shape, dtype=torch.float32, device=k.device) for _ in range(2)]
    _dkv_kernel[(key_tiles * splits,)](
        q, k, v, lse, dout, gate, delta, *parts, *strides, B, S, N, G, splits, scale, scale * LOG2E,
        **geometry, BM=tile.rows, BN=tile.keys, **tile.options,
    )  # fmt: skip
    if splits > 1:
        _sum_splits_kernel[(triton.cdiv(dk.numel(), 1024),)](*parts, dk, dv, dk.numel(), splits, BLOCK=1024)
    return dk, dv
