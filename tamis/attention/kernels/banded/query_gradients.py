"""Triton: the query gradient. One pass over the queries adds up the parts of all three branches.

The dense branches walk their keys as in `queries.py`. The selected branch left one part for each block that a token
chose (`selected/backward.py`): a program adds those up before it walks. A kernel of its own for them would write a sum
that this one reads again. The tokens of a prefix left no parts, and walk that branch's keys too.

Programs take the segments of a chunk (`selected/layout.py`) in order, and the tiles of each from its last tokens on.
Without the selected branch, a sequence is one segment.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.banded.queries import (
    Band,
    Rows,
    described_keys,
    key_tiles,
    keys_of_rows,
    load_keys,
    load_rows,
    program_tile,
    rows_from,
    seen_by_rows,
)
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedKernel,
    cdiv,
    copies_tiles,
    next_power_of_2,
    padded,
    precision,
    tile_for,
    unit_last_stride,
)

REGISTERS_OF_PARTS = 128  # of a thread, for parts that are read at once


class SelectedParts(NamedTuple):
    """What the items of a chunk left: a row of query gradient for each token, slot, part of a block, and head."""

    gradients: Tensor  # [segments · G · segment · n_sel · parts of a block · R, D]
    ids: Tensor  # int32 [B,S,G,n_sel]
    parts_of_block: int
    first_segment: int
    segments: int  # of the chunk
    segments_per_sequence: int
    segment: int  # tokens


@triton.jit
def _sum_of_parts(
    parts, ids, stride_is, segment_group, segment, t0, first_token, away, r, alive,
    SLOTS: tl.constexpr, SLOTS_P2: tl.constexpr, SUB: tl.constexpr, AT_ONCE: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """The selected branch's part of a tile's query gradient, summed in the order of a token's slots.

    With a PREFIX there are tiles without any parts, which read none. Without it, nearly every tile reads all slots.
    """
    column = tl.arange(0, DP)
    slot = tl.arange(0, SLOTS_P2)[None, :]
    choice = ids + t0.to(tl.int64) * stride_is + (away[:, None] * stride_is + slot)
    chosen = tl.load(choice, mask=alive[:, None] & (slot < SLOTS), other=-1)
    # A sum over slots comes in another layout than reads have. `gather` moves it once; without it, every mask of a read
    # would be moved, and wait for all warps.
    used = tl.gather(tl.sum((chosen >= 0).to(tl.int32), 1) * SUB, tl.arange(0, BM), 0)
    parts += (segment_group.to(tl.int64) * segment + (t0 - first_token)) * (SLOTS * SUB * R * D)
    first = (away * (SLOTS * SUB * R) + r) * D
    acc = tl.zeros([BM, DP], tl.float32)
    for begin in range(0, tl.max(used, 0) if PREFIX > 0 else SLOTS * SUB, AT_ONCE):
        read = ()
        for index in tl.static_range(AT_ONCE):  # all reads before anything that waits for one
            at = parts + (first + (begin + index) * (R * D))[:, None] + column[None, :]
            exists = (begin + index < used)[:, None]
            read += (tl.load(at, mask=exists if D == DP else exists & (column < D)[None, :], other=0.0),)  # type: ignore[assignment]
        for index in tl.static_range(AT_ONCE):
            acc += read[index].to(tl.float32)
    return acc


@triton.jit
def _position(table, token):
    """A token's position in its sequence or document."""
    return token if table is None else token - tl.load(table + 4 * token)


@triton.jit
def _ends_of_tile(tile, t0, first_token, S, R: tl.constexpr, BM: tl.constexpr):
    """First and last token of a tile of a segment."""
    return tl.minimum(t0, S - 1), tl.minimum(first_token + (tile * BM + BM - 1) // R, S - 1)


@triton.jit
def _add_dq(
    q, dout, dq, k, v, lse, gate, delta, table, sequence, g, first_row, row, alive, t_first, t_last, token,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, N, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, IS_PREFIX: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add one branch's part of a tile's query gradient, not yet times the softmax's scale.

    With IS_PREFIX only the first W tokens of a sequence, or document, see any key; W is at least the tokens of a tile.
    """
    if IS_PREFIX:
        alive = alive & (_position(table, token) < W)
    lse2 = tl.load(lse + first_row + row, mask=alive, other=float("inf")) * 1.4426950408889634
    delta_row = tl.load(delta + first_row + row, mask=alive, other=0.0)
    gate_row = tl.load(gate + first_row + row, mask=alive, other=0.0)
    begin, tiles, whole_first, whole_end = key_tiles(table, t_first, t_last, L, STRIDE, W, BN)
    if IS_PREFIX:  # if neither the first nor the last token sees any, all lie behind the prefix of one document
        sees_keys = (_position(table, t_first) < W) | (_position(table, t_last) < W)
        tiles = tl.where(sees_keys, tiles, 0)
    seen_begin, seen_end = keys_of_rows(table, token, L, STRIDE, W)
    if not COPIED:
        k += sequence.to(tl.int64) * stride_kb + g * stride_kg
        v += sequence.to(tl.int64) * stride_vb + g * stride_vg
    for j in tl.range(0, tiles, num_stages=STAGES):
        first = begin + j * BN
        k_tile = load_keys(k, sequence, g, first, N, stride_kn, D, DP, BN, COPIED)
        v_tile = load_keys(v, sequence, g, first, N, stride_vn, D, DP, BN, COPIED)
        k_transposed, v_transposed = tl.trans(k_tile), tl.trans(v_tile)
        if (not COPIED) or j < tiles:  # always true: see the top of `queries.py`
            s = tl.dot(q, k_transposed, input_precision=PRECISION)
            dp = tl.dot(dout, v_transposed, input_precision=PRECISION)
            p = tl.exp2(s * scale - lse2[:, None])
            if (j < whole_first) | (j >= whole_end):
                key = first + tl.arange(0, BN)
                p = tl.where(seen_by_rows(table, token, seen_begin, seen_end, key, L, STRIDE, W), p, 0.0)
            ds = p * (dp * gate_row[:, None] - delta_row[:, None])
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@PreparedKernel
@triton.jit(do_not_specialize=["S", "G", "N", "N2", "N3", "first_segment", "per_sequence", "segment"])
def _dq_kernel(
    q, dout, dq, parts, ids, k, v, lse, gate, delta, table, k2, v2, lse2, gate2, delta2, table2,
    k3, v3, lse3, gate3, delta3, table3,
    stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh, stride_db, stride_ds, stride_dh,
    stride_ib, stride_is, stride_ig,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, N,
    stride_kb2, stride_kn2, stride_kg2, stride_vb2, stride_vn2, stride_vg2, N2,
    stride_kb3, stride_kn3, stride_kg3, stride_vb3, stride_vn3, stride_vg3, N3,
    S, G, first_segment, per_sequence, segment, softmax_scale, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    L2: tl.constexpr, STRIDE2: tl.constexpr, W2: tl.constexpr, PREFIX: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_P2: tl.constexpr, SUB: tl.constexpr, AT_ONCE: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dq of up to three branches: queries and gradients are read once, and dq is rounded once.

    The first PREFIX tokens of a sequence, or document, left no parts of the selected branch: they see the third keys.
    Without any parts, those are all tokens, and PREFIX is a window that is never full.
    """
    tile, in_chunk, g = program_tile(tl.cdiv(segment * R, BM), G)
    index = first_segment + in_chunk
    sequence, first_token = index // per_sequence, index % per_sequence * segment
    b = sequence.to(tl.int64)
    t0, away, r, alive = rows_from(tile * BM, tl.minimum(segment, S - first_token), R, BM)
    t0 += first_token
    token, head = tl.minimum(t0 + away, S - 1), g * R + r
    q_tile = load_rows(q + b * stride_qb, t0, away, head, alive, stride_qs, stride_qh, D, DP, True)
    dout_tile = load_rows(dout + b * stride_ob, t0, away, head, alive, stride_os, stride_oh, D, DP, True)
    if PREFIX > 0:  # here or below: the place changes the compiled code, and each form is the one proved on a GPU
        t_first, t_last = _ends_of_tile(tile, t0, first_token, S, R, BM)
    if parts is None:
        acc = tl.zeros([BM, DP], tl.float32)
    else:
        left_parts = alive
        if PREFIX > 0:
            left_parts = alive & (_position(table3, token) >= PREFIX)
        acc = _sum_of_parts(
            parts, ids + b * stride_ib + g * stride_ig, stride_is, in_chunk * G + g, segment, t0, first_token, away, r,
            left_parts, SLOTS, SLOTS_P2, SUB, AT_ONCE, R, D, DP, BM, PREFIX,
        )  # fmt: skip
    first_row, row = (b * G + g) * R * S + t0, r * S + away
    if PREFIX == 0:
        t_first, t_last = _ends_of_tile(tile, t0, first_token, S, R, BM)
    if k3 is not None:
        acc = _add_dq(
            q_tile, dout_tile, acc, k3, v3, lse3, gate3, delta3, table3, sequence, g, first_row, row, alive,
            t_first, t_last, token, stride_kb3, stride_kn3, stride_kg3, stride_vb3, stride_vn3, stride_vg3, N3, scale,
            1, 1, PREFIX, parts is not None, D, DP, BN, PRECISION, COPIED, STAGES,
        )  # fmt: skip
    if k is not None:
        acc = _add_dq(
            q_tile, dout_tile, acc, k, v, lse, gate, delta, table, sequence, g, first_row, row, alive,
            t_first, t_last, token, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, N, scale,
            L, STRIDE, W, False, D, DP, BN, PRECISION, COPIED, STAGES,
        )  # fmt: skip
    if k2 is not None:
        acc = _add_dq(
            q_tile, dout_tile, acc, k2, v2, lse2, gate2, delta2, table2, sequence, g, first_row, row, alive,
            t_first, t_last, token, stride_kb2, stride_kn2, stride_kg2, stride_vb2, stride_vn2, stride_vg2, N2, scale,
            L2, STRIDE2, W2, False, D, DP, BN, PRECISION, COPIED, STAGES,
        )  # fmt: skip
    column = tl.arange(0, DP)
    address = dq + b * stride_db + t0.to(tl.int64) * stride_ds
    address += (away * stride_ds + head * stride_dh)[:, None] + column[None, :]
    mask = alive[:, None] & (column < D)[None, :]
    tl.store(address, (acc * softmax_scale).to(dq.dtype.element_ty), mask=mask)


def write_query_gradient(
    q: Tensor,
    dout: Tensor,
    dq: Tensor,
    scale: float,
    dense: Sequence[tuple[Band, Rows]] = (),
    selected: SelectedParts | None = None,
    prefix: tuple[Band, Rows] | None = None,
) -> None:
    """Write the query gradient of up to two dense branches and of the selected one, within its chunk.

    `dout` is the gradient of the mixed output, not yet times any gate; `scale` that of the scores. The tokens of a
    `prefix` left no parts, and see its keys.
    """
    q, dout = unit_last_stride(q), unit_last_stride(dout)
    B, S, H, D = q.shape
    G = selected.ids.shape[2] if selected else (prefix or dense[0])[0].k.shape[2]
    R = H // G
    copied = bool(dense) and all(copies_tiles(R, band.k, band.v) for band, _ in dense)
    tile = tile_for("dq", q, R, copied)
    assert prefix is None or tile.rows <= prefix[0].window, "a document within a tile could be passed over"
    tensors, numbers, constants = _dense_arguments(dense, prefix, tile.keys, copied)
    gradients, ids, sub, first_segment, segments, per_sequence, segment = selected or (None, None, 1, 0, B, 1, S)
    slots, ids_strides = (1, (0, 0, 0)) if ids is None else (ids.shape[3], ids.stride()[:3])
    registers_of_part = max(1, tile.rows * padded(D) * q.element_size() // (4 * 32 * tile.warps))
    at_once = min(max(1, REGISTERS_OF_PARTS // registers_of_part), next_power_of_2(slots * sub))
    _dq_kernel[(cdiv(segment * R, tile.rows) * segments * G,)](
        q, dout, dq, gradients, ids, *tensors,
        *q.stride()[:3], *dout.stride()[:3], *dq.stride()[:3], *ids_strides, *numbers,
        S, G, first_segment, per_sequence, segment, scale, scale * LOG2E, **constants,
        SLOTS=slots, SLOTS_P2=next_power_of_2(slots), SUB=sub, AT_ONCE=at_once,
        R=R, D=D, DP=padded(D), PRECISION=precision(q.dtype),
        BM=tile.rows, BN=tile.keys, COPIED=copied, STAGES=tile.stages, **tile.options,
    )  # fmt: skip


def _dense_arguments(
    dense: Sequence[tuple[Band, Rows]], prefix: tuple[Band, Rows] | None, keys: int, copied: bool
) -> tuple[list[object], list[int], dict[str, int]]:
    """Tensors, numbers and constants of two branches and the prefix, those that are absent included."""
    tensors: list[object] = []
    numbers: list[int] = []
    for branch in (*dense, *[None] * (2 - len(dense)), prefix):
        if branch is None:
            tensors += [None] * 6
            numbers += [0] * 7
            continue
        band, rows = branch
        tensors += (described_keys(x, keys, copied) for x in (band.k, band.v))
        tensors += [rows.lse, rows.gate, rows.delta, band.documents]
        numbers += [*band.strides, band.k.shape[1]]
    shapes = [(band.length, band.stride, band.window) for band, _ in dense] + [(1, 1, 0)] * (2 - len(dense))
    (L, STRIDE, W), (L2, STRIDE2, W2) = shapes
    constants = {"L": L, "STRIDE": STRIDE, "W": W, "L2": L2, "STRIDE2": STRIDE2, "W2": W2}
    return tensors, numbers, constants | {"PREFIX": prefix[0].window if prefix else 0}
