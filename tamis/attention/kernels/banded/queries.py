"""Triton: attention where each query sees one run of keys, as in the compressed and the window branch.

Key `n` ends at position `n·STRIDE + L − 1` and is visible from there on, and with a window only to the `W` tokens that
follow: the compressed branch is (L=l, STRIDE=d, no window), the window branch (L=1, STRIDE=1, W=w).

This file has the forward kernel, whose programs hold queries and walk keys, and what it shares with the other files:
`query_gradients.py` does the same for dq, `keys.py` has dk and dv. The few tiles of keys at the edges, which not every
row sees whole, are masked under a branch.

Rows of a tile are (token, head of the group) pairs, token by token: one tile of keys serves every head of the group and
no group size is padded. The first query has position `start`, for a tile of a sequence whose keys are cached. A kernel
that gets None for it is compiled without it: training pays nothing. In a packed row the run of keys ends at the
document of the token, which `table` has (`PackedTables.token`); a kernel that gets None for it is compiled without it.

The tensor memory accelerator copies a tile whose tensor comes as a descriptor (COPIED); other tiles are read through
pointers. Copies need neither registers nor instructions for addresses; at head dim 128 that decides what fits. Two
stages of copies are all that fits, and Triton issues the next tile's copies last in a loop and waits for them first in
the next round. It moves an `if` behind them: so the loops over copied tiles have all but the loads in an `if` that
always holds, which the compiler does not know. It reads ahead for an `if` where the loop itself names its stages. What
is used only transposed is transposed before the `if`, or it would take one more buffer.

Shapes: B batch, S tokens, H heads, G groups, R = H/G, D head dim, N keys; `BM` rows and `BN` keys in a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.attention.kernels.gates import NOT_MIXED
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedKernel,
    cdiv,
    copies_tiles,
    padded,
    precision,
    read_start,
    specializes_warps,
    start_argument,
    takes_boxes,
    tile_for,
    unit_last_stride,
)  # fmt: skip
from tamis.attention.kernels.tape import empty
from tamis.attention.spec import Start


class Band(NamedTuple):
    """Keys and values `[B,N,G,D]` with unit stride in D; key `n` ends at position `n·stride + length − 1`.

    It is visible from there on, and with a window only to the `window` tokens that follow.
    """

    k: Tensor
    v: Tensor
    length: int
    stride: int
    window: int
    scale: float  # of the scores
    documents: Tensor | None = None  # of a packed row: `PackedTables.token`
    rows_of_key: Tensor | None = None  # with a window the same, else `PackedTables.compressed`
    tiles_of_keys: Tensor | None = None  # without a window `PackedTables.tile`
    is_prefix: bool = False  # backward alone: only the first `window` tokens of a sequence, or document, see any key

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.k.stride()[:3], *self.v.stride()[:3]


class Rows(NamedTuple):
    """Log-sum-exp, gate and `delta = gate·<dout, out>` of every row, `[B,H,S]` float32.

    Half-precision numbers one by one cannot be read ahead, and would stall every step.
    """

    lse: Tensor
    gate: Tensor
    delta: Tensor


@triton.jit
def program_tile(tiles, G):
    """This program's tile of rows, sequence and group; groups are adjacent, then tiles, then sequences.

    Programs that run together then read neighbouring rows and few sequences' keys. The last tokens of a sequence see
    the most keys: longest first.
    """
    rest = tl.program_id(0) // G
    return tiles - 1 - rest % tiles, rest // tiles, tl.program_id(0) % G


@triton.jit
def keys_begun(token, W: tl.constexpr):
    """First key in the token's window."""
    return tl.maximum(token - W + 1, 0) if W > 0 else token * 0


@triton.jit
def keys_ended(token, L: tl.constexpr, STRIDE: tl.constexpr):
    """Keys that end at or before the token."""
    return tl.maximum((token + 1 - L + STRIDE) // STRIDE, 0)


@triton.jit
def keys_of_token(table, token, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """First key that a token of a packed row sees, and the one after the last."""
    first_token = tl.load(table + 4 * token)
    if W > 0:
        return tl.maximum(token - W + 1, first_token), token + 1
    first_key = tl.load(table + 4 * token + 3)
    return first_key, first_key + keys_ended(token - first_token, L, STRIDE)


@triton.jit
def visible(token, key, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    seen = key < keys_ended(token, L, STRIDE)
    if W > 0:
        seen = seen & (key >= keys_begun(token, W))
    return seen


@triton.jit
def key_tiles(table, t_first, t_last, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, BN: tl.constexpr):
    """The keys of tokens t_first…t_last as tiles from `begin`: how many, and which of them every token sees whole.

    The minimum of both ends is always the first. It stays, because without it the compiled code spills.
    """
    if table is None:
        begin, end = keys_begun(t_first, W), keys_ended(t_last, L, STRIDE)
        tiles = tl.cdiv(end - begin, BN)
        whole_first = tl.cdiv(keys_begun(t_last, W) - begin, BN)
        whole_end = (tl.minimum(keys_ended(t_first, L, STRIDE), end) - begin) // BN
    else:
        begin, first_end = keys_of_token(table, t_first, L, STRIDE, W)
        last_begin, end = keys_of_token(table, t_last, L, STRIDE, W)
        tiles, whole_first = tl.cdiv(end - begin, BN), tl.cdiv(last_begin - begin, BN)
        whole_end = (first_end - begin) // BN
    return begin, tiles, whole_first, whole_end


@triton.jit
def keys_of_rows(table, token, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """As `keys_of_token` for the rows of a tile, looked up before the loop: in it, products would not overlap."""
    seen_begin, seen_end = token, token
    if table is not None:
        seen_begin, seen_end = keys_of_token(table, token, L, STRIDE, W)
    return seen_begin, seen_end


@triton.jit
def seen_by_rows(table, token, seen_begin, seen_end, key, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Whether each row `[BM]` sees each key `[BN]`; `keys_of_rows` has the limits of a packed row."""
    if table is None:
        return visible(token[:, None], key[None, :], L, STRIDE, W)
    return (key[None, :] >= seen_begin[:, None]) & (key[None, :] < seen_end[:, None])


@triton.jit
def rows_from(first, S, R: tl.constexpr, BM: tl.constexpr):
    """The tile's first token, then for each row its distance from it, its head of the group, and whether it exists.

    Addresses are a 64-bit offset of the tile plus 32-bit distances within it: half the registers, and 1M tokens fit.
    """
    t0 = first // R
    local = tl.arange(0, BM) if BM % R == 0 else first - t0 * R + tl.arange(0, BM)
    away = local // R
    return t0, away, local - away * R, away < S - t0


@triton.jit
def load_rows(x, t0, away, head, alive, stride_s, stride_h, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    column = tl.arange(0, DP)
    address = x + t0.to(tl.int64) * stride_s + ((away * stride_s + head * stride_h)[:, None] + column[None, :])
    if MASKED:
        mask = alive[:, None] if D == DP else alive[:, None] & (column < D)[None, :]
        return tl.load(address, mask=mask, other=0.0)
    if D == DP:
        return tl.load(address)
    return tl.load(address, mask=(column < D)[None, :], other=0.0)


@triton.jit
def load_keys(x, b, g, first, N, stride_n, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr):
    """BN keys from `first` on, zeros past the last; of batch b and group g if COPIED, else of those x points to."""
    return tl.reshape(x.load([b, first, g, 0]), [BN, DP]) if COPIED else _read_keys(x, first, N, stride_n, D, DP, BN)


@triton.jit
def _read_keys(x, first, N, stride_n, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    key = tl.arange(0, BN)
    column = tl.arange(0, DP)
    address = x + first.to(tl.int64) * stride_n + (key[:, None] * stride_n + column[None, :])
    mask = (first + key < N)[:, None]
    return tl.load(address, mask=mask if D == DP else mask & (column < D)[None, :], other=0.0)


def described_keys(x: Tensor, keys: int, copied: bool) -> Tensor | TensorDescriptor:
    """Keys or values `[B,N,G,D]` as the argument of a kernel."""
    return TensorDescriptor(x, [*x.shape], [*x.stride()], [1, keys, 1, padded(x.shape[3])]) if copied else x


@triton.jit
def _softmax_step(s, v, m, total, acc, scale, PRECISION: tl.constexpr):
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return m_new, total * shrink + tl.sum(p, 1), acc


@PreparedKernel
@triton.jit(do_not_specialize=["S", "N", "G", "start"])
def _forward_kernel(
    q, k, v, out, lse, table,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    S, N, G, start, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, sequence, g = program_tile(tl.cdiv(S * R, BM), G)
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
    begin, tiles, whole_first, whole_end = key_tiles(table, t_first, t_last, L, STRIDE, W, BN)
    seen_begin, seen_end = keys_of_rows(table, position, L, STRIDE, W)
    m = tl.full([BM], float("-inf"), tl.float32)
    if table is not None:
        m = tl.where(seen_begin < seen_end, m, 0.0)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in tl.range(0, tiles, num_stages=STAGES):
        first = begin + j * BN
        k_tile = load_keys(k, sequence, g, first, N, stride_kn, D, DP, BN, COPIED)
        v_tile = load_keys(v, sequence, g, first, N, stride_vn, D, DP, BN, COPIED)
        k_transposed = tl.trans(k_tile)
        if (not COPIED) or j < tiles:  # always true: see the top of this file
            s = tl.dot(q_tile, k_transposed, input_precision=PRECISION)
            if (j < whole_first) | (j >= whole_end):
                key = first + tl.arange(0, BN)
                seen = seen_by_rows(table, position, seen_begin, seen_end, key, L, STRIDE, W)
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


def copies_heads(q: Tensor, k: Tensor, v: Tensor, start: Start = 0) -> bool:
    """Whether `queries_on_hopper.py` has the kernel for these."""
    pairs_of_heads = q.shape[2] // k.shape[2] % 2 == 0
    return pairs_of_heads and start_argument(start) is None and specializes_warps(q, k, v)


def copies_boxes(q: Tensor, k: Tensor, v: Tensor, start: Start = 0) -> bool:
    """Whether these take the kernel of `hopper/boxes.py`."""
    return start_argument(start) is None and takes_boxes(q, k, v)


def banded_forward(
    q: Tensor, band: Band, start: Start = 0, mixture: tuple[Tensor | None, ...] = NOT_MIXED
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and natural log-sum-exp `[B,H,S]`; 0 and −inf for a row that sees no key.

    The first query has position `start`, counted from the first key. A `mixture` (the mixed output, the gates, the
    outputs of the other branches) is computed along with the window, where `copies_boxes` holds.
    """
    q = unit_last_stride(q)
    B, S, H, D = q.shape
    N, G = band.k.shape[1:3]
    R = H // G
    out = empty((B, S, H, D), q.dtype, q.device)
    lse = empty((B, H, S), torch.float32, q.device)
    if copies_boxes(q, band.k, band.v, start):
        from tamis.attention.kernels.hopper.boxes import attend_run  # here, because not every Triton has Gluon

        limits = band.documents, band.length, band.stride, band.window
        attend_run(q, band.k, band.v, out, lse, band.scale * LOG2E, *limits, mixture)
        return out, lse
    assert mixture is NOT_MIXED, "only the kernel above mixes"
    if copies_heads(q, band.k, band.v, start):
        from tamis.attention.kernels.banded.queries_on_hopper import forward_on_hopper

        forward_on_hopper(q, band, out, lse)
        return out, lse
    copied = copies_tiles(R, band.k, band.v)
    tile = tile_for("forward", q, R, copied)
    _forward_kernel[(cdiv(S * R, tile.rows) * B * G,)](
        q, *(described_keys(x, tile.keys, copied) for x in (band.k, band.v)), out, lse, band.documents,
        *q.stride()[:3], *band.strides, S, N, G, start_argument(start), band.scale * LOG2E,
        L=band.length, STRIDE=band.stride, W=band.window, R=R, D=D, DP=padded(D), PRECISION=precision(q.dtype),
        BM=tile.rows, BN=tile.keys, COPIED=copied, STAGES=tile.stages, **tile.options,
    )  # fmt: skip
    return out, lse
