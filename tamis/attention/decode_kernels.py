"""Triton: one query of each sequence over its caches, in two launches; nothing is read back by the host.

`_scan_kernel` walks the compressed blocks and the window, split over programs, and leaves every split's output and
log-sum-exp, and the compressed logits. `_finish_kernel` scores and chooses the blocks, walks its share of the chosen
tokens, and the last program of a group to arrive mixes all splits of all branches under the gates, in a fixed order.

Shapes: B sequences, H heads, G groups, R = H/G, D head dim, N compressed blocks, X splits (compressed, then window,
then selected), 2: key, then value. Logits and log-sum-exps are in base 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.spec import NSASpec
from tamis.attention.tiles import LOG2E, Tile, padded, precision

SCANS_WANTED = 528  # programs of the first launch: four for each multiprocessor of an H200
FINISHES_WANTED = 132  # of the second: each chooses the blocks anew, so one for each multiprocessor
MOST_SPLITS = 32  # of one branch; merging more costs more than the shorter walk saves
SCORE_ELEMENTS = 8192  # (head, block) pairs scored at once, in registers
MERGE_ELEMENTS = 8192  # (split, head, dim) numbers merged at once


@dataclass(frozen=True)
class Splits:
    """Over how many programs each branch of one (query, group) is spread."""

    compressed: int
    window: int
    selected: int

    @property
    def total(self) -> int:
        return self.compressed + self.window + self.selected


@triton.jit
def _softmax_step(
    q, kv, row, seen, column, stride_t, stride_2, m, total, acc, scale, D: tl.constexpr, PRECISION: tl.constexpr
):
    """One tile of keys, found at `row`; also its logits, −inf where unseen."""
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


@triton.jit(do_not_specialize=["G", "x_cmp", "x_win", "x"])
def _scan_kernel(
    q, positions, compressed, window, part, part_lse, part_reads, logits, arrived,
    stride_q, stride_h, stride_cb, stride_cn, stride_c2, stride_cg, stride_wb, stride_wt, stride_w2, stride_wg,
    columns, G, slots, x_cmp, x_win, x, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    qg = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    query, group = qg // G, qg % G
    seen_tokens = tl.load(positions + query).to(tl.int32) + 1
    q_tile = _load_query(q, query, group, stride_q, stride_h, R, RP, D, DP)
    column = tl.arange(0, DP)
    r = tl.arange(0, RP)
    n = tl.arange(0, BN)
    m = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, DP], tl.float32)
    if split < x_cmp:
        blocks = tl.maximum((seen_tokens - L + STRIDE) // STRIDE, 0)
        share = tl.cdiv(tl.cdiv(blocks, x_cmp), BN) * BN
        begin = split * share
        end = tl.minimum(begin + share, blocks)
        compressed += query * stride_cb + group * stride_cg
        PIECES_SEL: tl.constexpr = L_SEL // STRIDE
        logits += qg * R * PIECES_SEL * columns
        for first in range(begin, end, BN):
            i = first + n
            m, total, acc, s = _softmax_step(
                q_tile, compressed, i, i < end, column, stride_cn, stride_c2, m, total, acc, scale, D, PRECISION
            )
            # Block i is kept at [i % PIECES_SEL, i // PIECES_SEL]: what scoring reads together lies together.
            at = logits + r[:, None] * PIECES_SEL * columns + (i % PIECES_SEL * columns + i // PIECES_SEL)[None, :]
            tl.store(at, s, mask=(r < R)[:, None] & (i < end)[None, :])
    else:
        oldest = tl.maximum(seen_tokens - W, 0)
        share = tl.cdiv(tl.cdiv(seen_tokens - oldest, x_win), BN) * BN
        begin = oldest + (split - x_cmp) * share
        end = tl.minimum(begin + share, seen_tokens)
        window += query * stride_wb + group * stride_wg
        for first in range(begin, end, BN):
            t = first + n
            m, total, acc, _ = _softmax_step(
                q_tile, window, t % slots, t < end, column, stride_wt, stride_w2, m, total, acc, scale, D, PRECISION
            )
    _store_split(part, part_lse, part_reads, qg * x + split, m, total, acc, tl.maximum(end - begin, 0), R, RP, D, DP)
    if split == 0:
        tl.store(arrived + qg, 0)


@triton.jit
def _branch_lse(part_lse, first, splits, R: tl.constexpr, RH: tl.constexpr, XP: tl.constexpr):
    """Log-sum-exp of each head over the splits of a branch; 0 where it saw nothing, so that weights come out 0."""
    x = tl.arange(0, XP)
    r = tl.arange(0, RH)
    mask = (x < splits)[:, None] & (r < R)[None, :]
    lse = tl.load(
        part_lse + (first + x)[:, None] * R + r[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg"
    )
    m = tl.max(lse, 0)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2(lse - m_safe[None, :]), 0)
    return tl.where(total > 0.0, m_safe + tl.log2(tl.where(total > 0.0, total, 1.0)), 0.0)


@triton.jit
def _best_blocks(logits, lse, columns, blocks, newest, PIECES: tl.constexpr, PIECES_SEL: tl.constexpr,
                 R: tl.constexpr, RH: tl.constexpr, NP: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """Ids of the NP best-scored blocks among 1 … newest−2, best first; meaningless where there are fewer."""
    r = tl.arange(0, RH)
    best = tl.full([NP], -1, tl.int64)
    for first in range(0, newest - 1, BJ):
        j = first + tl.arange(0, BJ)
        candidate = (j >= 1) & (j <= newest - 2)
        score = tl.zeros([BJ], tl.float32)
        # Every compressed block that touches j begins at one of these offsets, and lies in it with `overlap` pieces.
        for offset in tl.range(1 - PIECES, PIECES_SEL, loop_unroll_factor=min(8, PIECES + PIECES_SEL - 1)):
            i = j * PIECES_SEL + offset
            inside = candidate & (i >= 0) & (i < blocks)
            shifted = offset + PIECES * PIECES_SEL  # not negative, so that quotient and rest are whole
            place = shifted % PIECES_SEL * columns + j + shifted // PIECES_SEL - PIECES
            at = logits + r[:, None] * PIECES_SEL * columns + place[None, :]
            s = tl.load(at, mask=inside[None, :] & (r < R)[:, None], other=float("-inf"))
            overlap = tl.minimum(offset + PIECES, PIECES_SEL) - tl.maximum(offset, 0)
            score += tl.sum(tl.exp2(s - lse[:, None]), 0) * overlap
        # (score bits, inverted index): a larger key is a better block, ties go to the lower index.
        key = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - j).to(tl.int64)
        piece = tl.topk(tl.where(candidate, key, -1), NP)
        best = tl.topk(tl.reshape(tl.join(best, piece), [2 * NP]), NP)
    return 2147483647 - (best & 2147483647).to(tl.int32)


@triton.jit
def _mixed_rows(part, part_lse, gates, r, x_cmp, x_win, x_sel, R: tl.constexpr, RH: tl.constexpr, D: tl.constexpr,
                DP: tl.constexpr, XP: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """`Σ gate · branch` from the splits of all branches, `[RH, DP]`."""
    column = tl.arange(0, DP)
    lse_cmp = _branch_lse(part_lse, 0, x_cmp, R, RH, XP)
    lse_win = _branch_lse(part_lse, x_cmp, x_win, R, RH, XP)
    lse_sel = _branch_lse(part_lse, x_cmp + x_win, x_sel, R, RH, XP)
    gate_cmp = tl.load(gates + r * 3, mask=r < R, other=0.0).to(tl.float32)
    gate_sel = tl.load(gates + r * 3 + 1, mask=r < R, other=0.0).to(tl.float32)
    gate_win = tl.load(gates + r * 3 + 2, mask=r < R, other=0.0).to(tl.float32)
    mixed = tl.zeros([RH, DP], tl.float32)
    for first in range(0, x_cmp + x_win + x_sel, BX):
        x = first + tl.arange(0, BX)
        is_cmp, is_win = (x < x_cmp)[:, None], (x < x_cmp + x_win)[:, None]
        whole = tl.where(is_cmp, lse_cmp[None, :], tl.where(is_win, lse_win[None, :], lse_sel[None, :]))
        gate = tl.where(is_cmp, gate_cmp[None, :], tl.where(is_win, gate_win[None, :], gate_sel[None, :]))
        mask = (x < x_cmp + x_win + x_sel)[:, None] & (r < R)[None, :]
        lse = tl.load(part_lse + x[:, None] * R + r[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg")
        weight = gate * tl.exp2(lse - whole)
        at = part + (x[:, None] * R + r[None, :])[:, :, None] * D + column[None, None, :]
        out = tl.load(at, mask=mask[:, :, None] & (column < D)[None, None, :], other=0.0, cache_modifier=".cg")
        mixed += tl.sum(weight[:, :, None] * out, 0)
    return mixed


@triton.jit(do_not_specialize=["G", "x_cmp", "x_win", "x_sel"])
def _finish_kernel(
    q, positions, selected, gates, part, part_lse, part_reads, logits, arrived, out, ids, reads,
    stride_q, stride_h, stride_sb, stride_st, stride_s2, stride_sg,
    columns, G, x_cmp, x_win, x_sel, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    RH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr, NP: tl.constexpr,
    BJ: tl.constexpr, BX: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    FREE: tl.constexpr = N_SEL - 3  # chosen by score; block 0 and the two newest are chosen always
    UNUSED: tl.constexpr = 2147483647
    x = x_cmp + x_win + x_sel
    qg = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    query, group = qg // G, qg % G
    position = tl.load(positions + query).to(tl.int32)
    newest = position // L_SEL
    slot = tl.arange(0, NP)
    chosen = tl.where(slot <= newest, slot, UNUSED)  # early queries take every block there is
    if newest >= N_SEL:
        lse = _branch_lse(part_lse + qg * x * R, 0, x_cmp, R, RH, XP)
        blocks = tl.maximum((position + 1 - L + STRIDE) // STRIDE, 0)
        chosen = tl.where(slot == FREE, 0, tl.where(slot == FREE + 1, newest - 1, newest))
        if FREE > 0:
            best = _best_blocks(
                logits + qg * R * (L_SEL // STRIDE) * columns, lse, columns, blocks, newest,
                L // STRIDE, L_SEL // STRIDE, R, RH, NP, BJ,
            )  # fmt: skip
            chosen = tl.where(slot < FREE, best, chosen)
    chosen = tl.sort(tl.where(slot < N_SEL, chosen, UNUSED))
    if split == 0:
        tl.store(ids + qg * N_SEL + slot, tl.where(chosen == UNUSED, -1, chosen), mask=slot < N_SEL)

    q_tile = _load_query(q, query, group, stride_q, stride_h, R, RP, D, DP)
    selected += query * stride_sb + group * stride_sg
    column = tl.arange(0, DP)
    m = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, DP], tl.float32)
    read = 0
    share = tl.cdiv(tl.cdiv(N_SEL * L_SEL, x_sel), BN) * BN
    for first in range(split * share, tl.minimum((split + 1) * share, N_SEL * L_SEL), BN):
        place = first + tl.arange(0, BN)
        inside = place < N_SEL * L_SEL
        block = tl.gather(chosen, tl.where(inside, place // L_SEL, 0), 0)
        token = block * L_SEL + place % L_SEL
        seen = inside & (block != UNUSED) & (token <= position)
        m, total, acc, _ = _softmax_step(
            q_tile, selected, tl.where(seen, token, 0), seen, column, stride_st, stride_s2, m, total, acc, scale,
            D, PRECISION,
        )  # fmt: skip
        read += tl.sum(seen.to(tl.int32), 0)
    _store_split(part, part_lse, part_reads, qg * x + x_cmp + x_win + split, m, total, acc, read, R, RP, D, DP)

    tl.debug_barrier()  # every thread's share is stored before one of them says so
    if tl.atomic_add(arrived + qg, 1) == x_sel - 1:
        r = tl.arange(0, RH)
        mixed = _mixed_rows(
            part + qg * x * R * D, part_lse + qg * x * R, gates + qg * R * 3, r, x_cmp, x_win, x_sel, R, RH, D, DP, XP,
            BX,
        )  # fmt: skip
        at = out + (qg * R + r)[:, None] * D + column[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=(r < R)[:, None] & (column < D)[None, :])
        each = tl.arange(0, XP)
        counted = tl.load(part_reads + qg * x + each, mask=each < x, other=0, cache_modifier=".cg")
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed output `[B,H,D]`, chosen blocks `[B,G,n]` and keys read `[B,G]` of one query for each cached sequence.

    Token `t` of the window lies in slot `t % W`.
    """
    q_BHD, gates_BH3, positions_B = (x.contiguous() for x in (q_BHD, gates_BH3, positions_B))
    B, H, D = q_BHD.shape
    N, G = compressed_BN2GD.shape[1], compressed_BN2GD.shape[3]
    R, DP = H // G, padded(D)
    splits = splits or splits_for(B * G, N, spec)
    X = splits.total
    columns = 16 * triton.cdiv(triton.cdiv(N, spec.pieces_per_selected), 16)
    part, part_lse, logits = (
        torch.empty(*shape, dtype=torch.float32, device=q_BHD.device)
        for shape in ((B, G, X, R, D), (B, G, X, R), (B, G, R, spec.pieces_per_selected, columns))
    )
    part_reads, arrived, reads, ids = (
        torch.empty(*shape, dtype=torch.int32, device=q_BHD.device)
        for shape in ((B, G, X), (B, G), (B, G), (B, G, spec.n_sel))
    )
    out = torch.empty_like(q_BHD)
    shape = {"L": spec.l, "STRIDE": spec.d, "L_SEL": spec.l_sel, "R": R, "RP": max(16, triton.next_power_of_2(R)),
             "D": D, "DP": DP, "PRECISION": precision(q_BHD.dtype)}  # fmt: skip
    scan, finish = _tiles(DP, q_BHD.dtype)
    scale = D**-0.5 * LOG2E
    _scan_kernel[(B * G, splits.compressed + splits.window)](
        q_BHD, positions_B, compressed_BN2GD, window_BW2GD, part, part_lse, part_reads, logits, arrived,
        *q_BHD.stride()[:2], *compressed_BN2GD.stride()[:4], *window_BW2GD.stride()[:4],
        columns, G, window_BW2GD.shape[1], splits.compressed, splits.window, X, scale,
        W=spec.w, BN=scan.keys, **shape,
        num_warps=scan.warps, num_stages=scan.stages,
    )  # fmt: skip
    RH, NP = triton.next_power_of_2(R), triton.next_power_of_2(spec.n_sel)
    _finish_kernel[(B * G, splits.selected)](
        q_BHD, positions_B, selected_BT2GD, gates_BH3, part, part_lse, part_reads, logits, arrived, out, ids, reads,
        *q_BHD.stride()[:2], *selected_BT2GD.stride()[:4], columns, G, splits.compressed, splits.window,
        splits.selected, scale,
        N_SEL=spec.n_sel, RH=RH, BN=finish.keys, NP=NP,
        BJ=_blocks_at_once(selected_BT2GD.shape[1], RH, NP, spec),
        BX=max(1, min(16, MERGE_ELEMENTS // (RH * DP))), XP=max(64, triton.next_power_of_2(X)), **shape,
        num_warps=finish.warps, num_stages=finish.stages,
    )  # fmt: skip
    return out, ids, reads


def _blocks_at_once(capacity: int, heads: int, least: int, spec: NSASpec) -> int:
    """Selection blocks scored at once: all of a short cache, else as many as the registers hold."""
    every = triton.next_power_of_2(spec.selection_blocks(capacity))
    return max(least, min(every, 1024, SCORE_ELEMENTS // heads))


def splits_for(programs: int, blocks: int, spec: NSASpec) -> Splits:
    """Enough splits to fill the device when there are few (query, group) pairs, one when there are many."""
    scans, finishes = (max(1, min(MOST_SPLITS, n // programs)) for n in (SCANS_WANTED, FINISHES_WANTED))
    return Splits(
        compressed=min(scans, triton.cdiv(blocks, 128)),
        window=min(scans, triton.cdiv(spec.w, 128)),
        selected=min(finishes, triton.cdiv(spec.n_sel * spec.l_sel, 128)),
    )


def _tiles(padded_dim: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Of the scanning and the finishing kernel; rows are those of one group's heads, whatever their number."""
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1), Tile(16, 32, 8, 1)
    if padded_dim <= 64:
        return Tile(16, 128, 4, 3), Tile(16, 128, 8, 3)
    keys = 64 if padded_dim <= 128 else 32
    return Tile(16, keys, 4, 3), Tile(16, keys, 8, 3)
