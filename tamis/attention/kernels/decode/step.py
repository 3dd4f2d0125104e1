"""Triton: one query of each sequence over its caches, in two launches; nothing is read back by the host.

`_scan_kernel` walks the compressed blocks, split over programs, and leaves every split's output and log-sum-exp, and
the logits. Where there are many sequences it walks the blocks of two groups at once: a head's query stands where its
group's numbers stand in a row of keys, with zeros elsewhere, so that one product serves both. In `_finish_kernel` some
programs of a group choose the blocks and walk their share of the chosen tokens, others the window, one merges what the
scan left, and the last to arrive adds it all up under the gates, in a fixed order. So memory is read while blocks are
chosen.

Shapes: B sequences, H heads, G groups, R = H/G, D head dim, N compressed blocks, X splits (compressed, selected,
window, then the merged compressed one), 2: key, then value. Logits and log-sum-exps are in base 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tamis.attention.checks import Layouts, layouts_of
from tamis.attention.kernels.decode.choice import UNUSED, chosen_blocks
from tamis.attention.kernels.decode.splits import (
    MOST_SPLITS,
    Splits,
    launches_early,
    packed_groups,
    padded_rows,
    splits_for,
    tiles_for_step,
)
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedLaunch,
    cdiv,
    next_power_of_2,
    padded,
    precision,
)
from tamis.attention.spec import NSASpec

SCORE_BLOCKS = 1024  # selection blocks scored at once, in registers


@triton.jit
def _add_keys(
    q, kv, row, seen, column, stride_t, stride_2, m, total, acc, scale, D: tl.constexpr, PRECISION: tl.constexpr
):
    """Add one tile of keys, found at `row`, to the running softmax; also return its logits, −inf where unseen."""
    at = kv + row.to(tl.int64)[:, None] * stride_t + column[None, :]
    mask = seen[:, None] & (column < D)[None, :]
    k_tile = tl.load(at, mask=mask, other=0.0)
    v_tile = tl.load(at + stride_2, mask=mask, other=0.0)
    logits = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * scale
    logits = tl.where(seen[None, :], logits, float("-inf"))
    m_new = tl.maximum(m, tl.max(logits, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(logits - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
    return m_new, total * shrink + tl.sum(p, 1), acc, logits


@triton.jit
def _store_split(part, part_lse, part_reads, at, m, total, acc, reads, R: tl.constexpr, RP: tl.constexpr,
                 D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """The normalised output of one split, its log-sum-exp, and how many keys it read."""
    r = tl.arange(0, RP)
    column = tl.arange(0, DP)
    some = total > 0.0
    out = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, m + tl.log2(total), float("-inf"))
    mask = (r < R)[:, None] & (column < D)[None, :]
    tl.store(part + at * R * D + r[:, None] * D + column[None, :], out, mask=mask)
    tl.store(part_lse + at * R + r, lse, mask=r < R)
    tl.store(part_reads + at, reads)


@triton.jit
def _load_query(q, query, group, stride_q, stride_h, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr,
                DP: tl.constexpr):  # fmt: skip
    r = tl.arange(0, RP)
    column = tl.arange(0, DP)
    at = q + query * stride_q + (group * R + r)[:, None] * stride_h + column[None, :]
    return tl.load(at, mask=(r < R)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _store_packed(part, part_lse, part_reads, qg, x, split, m, total, acc, reads, R: tl.constexpr, RP: tl.constexpr,
                  PACK: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The same of PACK groups from `qg` on: of each row the part that is its group's."""
    r = tl.arange(0, RP)
    column = tl.arange(0, PACK * D)
    some = total > 0.0
    out = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, m + tl.log2(total), float("-inf"))
    at = ((qg + r // R) * x + split) * R + r % R
    own = (column // D)[None, :] == (r // R)[:, None]
    tl.store(part + at[:, None] * D + (column % D)[None, :], out, mask=own & (r < PACK * R)[:, None])
    tl.store(part_lse + at, lse, mask=r < PACK * R)
    for g in tl.static_range(PACK):
        tl.store(part_reads + (qg + g) * x + split, reads)


@triton.jit
def _in_scratch(scratch, at_lse, at_reads, at_arrived, at_logits):
    """What the two kernels share: the splits' outputs, log-sum-exps and keys read, arrivals, and the logits."""
    whole = tl.pointer_type(tl.int32)
    reads, arrived = (scratch + at_reads).to(whole, bitcast=True), (scratch + at_arrived).to(whole, bitcast=True)
    return scratch, scratch + at_lse, reads, arrived, scratch + at_logits


@triton.jit(do_not_specialize=["G", "x"])
def _scan_kernel(
    q, positions, compressed, scratch, at_lse, at_reads, at_arrived, at_logits, scale,
    stride_q, stride_h, stride_cb, stride_cn, stride_c2, stride_cg, row_length, G, x,
    L: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()  # the second kernel may start; it waits for the end of this one
    part, part_lse, part_reads, arrived, logits = _in_scratch(scratch, at_lse, at_reads, at_arrived, at_logits)
    pack = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    query, group = pack // (G // PACK), pack % (G // PACK) * PACK
    qg = query * G + group
    seen_tokens = tl.load(positions + query).to(tl.int32) + 1
    WIDTH: tl.constexpr = D if PACK == 1 else PACK * D  # of a row of keys; packed only where D is a power of two
    column = tl.arange(0, PACK * DP)
    r = tl.arange(0, RP)
    if PACK == 1:
        q_tile = _load_query(q, query, group, stride_q, stride_h, R, RP, D, DP)
    else:
        own = ((column // D)[None, :] == (r // R)[:, None]) & (r < PACK * R)[:, None]
        at_q = q + query * stride_q + (group * R + r)[:, None] * stride_h + (column % D)[None, :]
        q_tile = tl.load(at_q, mask=own, other=0.0)
    m = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, PACK * DP], tl.float32)
    blocks = tl.maximum((seen_tokens - L + STRIDE) // STRIDE, 0)
    share = tl.cdiv(tl.cdiv(blocks, tl.num_programs(1)), BN) * BN
    begin = split * share
    end = tl.minimum(begin + share, blocks)
    compressed += query * stride_cb + group * stride_cg
    logits += qg * R * row_length
    for first in range(begin, end, BN):
        i = first + tl.arange(0, BN)
        m, total, acc, s = _add_keys(
            q_tile, compressed, i, i < end, column, stride_cn, stride_c2, m, total, acc, scale, WIDTH, PRECISION
        )
        tl.store(logits + r[:, None] * row_length + i[None, :], s, mask=(r < PACK * R)[:, None] & (i < end)[None, :])
    reads = tl.maximum(end - begin, 0)
    if PACK == 1:
        _store_split(part, part_lse, part_reads, qg * x + split, m, total, acc, reads, R, RP, D, DP)
    else:
        _store_packed(part, part_lse, part_reads, qg, x, split, m, total, acc, reads, R, RP, PACK, D)
    if split == 0:
        for g in tl.static_range(PACK):
            tl.store(arrived + qg + g, 0)


@triton.jit
def _merged(part, part_lse, gate, splits, row, at, mask, R: tl.constexpr, D: tl.constexpr):
    """`gate · branch` from the splits of a branch; `row` and `at` are each element's head and index in a split.

    Every thread reads its own elements and their heads' log-sum-exps, so that none waits for another.
    """
    m = tl.full(row.shape, float("-inf"), tl.float32)
    for x in tl.range(0, splits, loop_unroll_factor=8):
        m = tl.maximum(m, tl.load(part_lse + x * R + row, mask=mask, other=float("-inf"), cache_modifier=".cg"))
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros(row.shape, tl.float32)
    mixed = tl.zeros(row.shape, tl.float32)
    for x in tl.range(0, splits, loop_unroll_factor=8):
        lse = tl.load(part_lse + x * R + row, mask=mask, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(lse - m)
        total += weight
        mixed += weight * tl.load(part + x * R * D + at, mask=mask, other=0.0, cache_modifier=".cg")
    gate = tl.load(gate + row * 3, mask=mask, other=0.0).to(tl.float32)
    return mixed * (gate / tl.where(total > 0.0, total, 1.0))


@triton.jit(do_not_specialize=["slots", "G", "x_cmp", "x_win", "x_sel"])
def _finish_kernel(
    q, positions, selected, window, gates, scratch, out, ids, reads, at_lse, at_reads, at_arrived, at_logits,
    scale, stride_q, stride_h, stride_sb, stride_st, stride_s2, stride_sg, stride_wb, stride_wt, stride_w2, stride_wg,
    row_length, slots, G, x_cmp, x_win, x_sel,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, RH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
    NP: tl.constexpr, BJ: tl.constexpr, XP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Three jobs by program, in one launch so that memory is read while blocks are chosen.

    Programs 0 … x_sel−1 of a (query, group) choose the blocks and walk a share of the chosen tokens, the next x_win
    walk the window, and the last one merges what the scan left. The program that arrives last adds all up under the
    gates. The first two jobs share one loop over keys, and so its buffers: hence the many arguments.
    """
    part, part_lse, part_reads, arrived, logits = _in_scratch(scratch, at_lse, at_reads, at_arrived, at_logits)
    x = x_cmp + x_sel + x_win + 1
    qg = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    query, group = qg // G, qg % G
    part += qg * x * R * D
    part_lse += qg * x * R
    gates += qg * R * 3
    column = tl.arange(0, DP)
    # As if nothing lay side by side, or Triton would spread elements and log-sum-exps over threads in different ways.
    row = tl.max_contiguous(tl.broadcast_to(tl.arange(0, RH)[:, None], [RH, DP]), [1, 1])
    at = tl.max_contiguous(row * D + column[None, :], [1, 1])
    mask = (row < R) & (column < D)[None, :]
    position = tl.load(positions + query).to(tl.int32)
    q_tile = _load_query(q, query, group, stride_q, stride_h, R, RP, D, DP)
    if EARLY:
        gdc_wait()
    if split == x_sel + x_win:
        mixed = _merged(part, part_lse, gates, x_cmp, row, at, mask, R, D)
        tl.store(part + (x - 1) * R * D + at, mixed, mask=mask)
    else:
        is_sel = split < x_sel
        chosen = tl.full([NP], 0, tl.int32)
        if is_sel:
            chosen = chosen_blocks(
                logits + qg * R * row_length, part_lse, position, x_cmp, row_length, L, STRIDE, L_SEL, N_SEL, R, RH,
                NP, BJ, XP,
            )  # fmt: skip
            if split == 0:
                slot = tl.arange(0, NP)
                tl.store(ids + qg * N_SEL + slot, tl.where(chosen == UNUSED, -1, chosen), mask=slot < N_SEL)
        # One loop for both branches, so that they share one set of buffers. An index is a token of the chosen blocks,
        # one block after the other, or of the window.
        count = tl.where(is_sel, N_SEL * L_SEL, W)
        share = tl.cdiv(tl.cdiv(count, tl.where(is_sel, x_sel, x_win)), BN) * BN
        begin = tl.where(is_sel, split, split - x_sel) * share
        kv = tl.where(
            is_sel, selected + (query * stride_sb + group * stride_sg), window + (query * stride_wb + group * stride_wg)
        )
        stride_t, stride_2 = tl.where(is_sel, stride_st, stride_wt), tl.where(is_sel, stride_s2, stride_w2)
        slots = tl.where(is_sel, UNUSED, slots)
        oldest = tl.maximum(position + 1 - W, 0)
        m = tl.full([RP], float("-inf"), tl.float32)
        total = tl.zeros([RP], tl.float32)
        acc = tl.zeros([RP, DP], tl.float32)
        read = 0
        for first in range(begin, tl.minimum(begin + share, count), BN):
            index = first + tl.arange(0, BN)
            inside = index < count
            block = tl.gather(chosen, tl.where(inside & is_sel, index // L_SEL, 0), 0)
            token = tl.where(is_sel, block * L_SEL + index % L_SEL, oldest + index)
            seen = inside & (block != UNUSED) & (token <= position)
            m, total, acc, _ = _add_keys(
                q_tile, kv, tl.where(seen, token % slots, 0), seen, column, stride_t, stride_2, m, total, acc, scale,
                D, PRECISION,
            )  # fmt: skip
            read += tl.sum(seen.to(tl.int32), 0)
        _store_split(part, part_lse, part_reads + qg * x, x_cmp + split, m, total, acc, read, R, RP, D, DP)

    tl.debug_barrier()  # every thread's share is stored before one of them signals it
    if tl.atomic_add(arrived + qg, 1) == x_sel + x_win:
        mixed = tl.load(part + (x - 1) * R * D + at, mask=mask, other=0.0, cache_modifier=".cg")
        part += x_cmp * R * D
        part_lse += x_cmp * R
        mixed += _merged(part, part_lse, gates + 1, x_sel, row, at, mask, R, D)
        mixed += _merged(part + x_sel * R * D, part_lse + x_sel * R, gates + 2, x_win, row, at, mask, R, D)
        tl.store(out + qg * R * D + at, mixed.to(out.dtype.element_ty), mask=mask)
        each = tl.arange(0, 4 * XP)
        counted = tl.load(part_reads + qg * x + each, mask=each < x - 1, other=0, cache_modifier=".cg")
        tl.store(reads + qg, tl.sum(counted, 0))


def decode(
    q_BHD: Tensor,
    compressed_BN2GD: Tensor,
    selected_BT2GD: Tensor,
    window_BW2GD: Tensor,
    gates_BH3: Tensor,
    positions_B: Tensor,
    spec: NSASpec,
    splits: Splits | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    layouts: Layouts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed output `[B,H,D]`, chosen blocks `[B,G,n]` and keys read `[B,G]` of one query for each cached sequence.

    Token `t` of the window lies in slot `t % W`. `into`: contiguous tensors for the blocks and the keys read.
    `layouts`: those of the six tensors, from a caller that has them.
    """
    if q_BHD.stride(2) != 1 or not (gates_BH3.is_contiguous() and positions_B.is_contiguous()):
        q_BHD, gates_BH3, positions_B = q_BHD.contiguous(), gates_BH3.contiguous(), positions_B.contiguous()
        layouts = None
    inputs = (q_BHD, compressed_BN2GD, selected_BT2GD, window_BW2GD, gates_BH3, positions_B)
    B, G = q_BHD.shape[0], compressed_BN2GD.shape[3]
    ids, reads = into or (
        torch.empty(B, G, spec.n_sel, dtype=torch.int32, device=q_BHD.device),
        torch.empty(B, G, dtype=torch.int32, device=q_BHD.device),
    )
    compiled_for = tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in (*inputs, ids, reads)])
    plan = _plan(layouts or layouts_of(inputs), compiled_for, spec, splits)
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=q_BHD.device)
    out = q_BHD.new_empty(q_BHD.shape)
    plan.scan(q_BHD, positions_B, compressed_BN2GD, scratch)
    plan.finish(q_BHD, positions_B, selected_BT2GD, window_BW2GD, gates_BH3, scratch, out, ids, reads)
    return out, ids, reads


class _Plan(NamedTuple):
    """The launches of a step and the numbers in what they share."""

    scan: PreparedLaunch
    finish: PreparedLaunch
    scratch: int


@lru_cache(maxsize=256)
def _plan(
    layouts: Layouts, compiled_for: tuple[tuple[torch.dtype, bool], ...], spec: NSASpec, splits: Splits | None
) -> _Plan:
    """Everything about a step that does not change from token to token; the host's time decides the speed of few."""
    shapes, strides, (dtype, *_), (device, *_) = zip(*layouts, strict=True)
    (B, H, D), compressed, selected, window = shapes[:4]
    N, G = compressed[1], compressed[3]
    R, DP, q = H // G, padded(D), torch.empty(0, dtype=dtype, device=device)
    pack = packed_groups(B, G, R, D)
    scan, finish = tiles_for_step(DP, q, B * G, pack)
    splits = splits or splits_for(B * G, N, spec, scan, finish)
    X, early = splits.total, launches_early(q)
    NP = next_power_of_2(spec.n_sel)
    blocks = spec.selection_blocks(selected[1])
    BJ = max(4 * NP, min(SCORE_BLOCKS, next_power_of_2(blocks)))
    # A head's logits: of whole runs of BJ blocks, for scores are read without masks; and so before block 0 and beyond.
    row_length = BJ * cdiv(blocks, BJ) * spec.pieces_per_selected
    parts = (B * G * X * R * D, B * G * X * R, B * G * X, B * G, spec.pieces_per_compressed)
    *at, scratch = accumulate(16 * cdiv(n, 16) for n in (*parts, B * H * row_length + spec.pieces_per_selected))
    shared = (*at[:3], at[4], D**-0.5 * LOG2E, *strides[0][:2])
    shape = {"L": spec.l, "STRIDE": spec.d, "R": R, "D": D, "DP": DP, "PRECISION": precision(dtype), "EARLY": early}
    return _Plan(
        scan=PreparedLaunch(
            _scan_kernel, (B * G // pack, splits.compressed, 1), (*shared, *strides[1][:4], row_length, G, X),
            shape | {"PACK": pack, "RP": padded_rows(pack * R), "BN": scan.keys} | scan.options,
        ),
        finish=PreparedLaunch(
            _finish_kernel, (B * G, splits.selected + splits.window + 1, 1),
            (*shared, *strides[2][:4], *strides[3][:4], row_length, window[1], G,
             splits.compressed, splits.window, splits.selected),
            shape | {"RP": padded_rows(R), "RH": next_power_of_2(R), "L_SEL": spec.l_sel, "N_SEL": spec.n_sel,
                     "W": spec.w, "BN": finish.keys, "NP": NP, "BJ": BJ, "XP": MOST_SPLITS}
            | finish.options | ({"launch_pdl": True} if early else {}),
        ),
        scratch=scratch,
    )  # fmt: skip
