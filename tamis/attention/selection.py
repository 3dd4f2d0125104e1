"""Triton: which blocks each query and group attends to, from the queries, the compressed keys and their log-sum-exp.

Two kernels. `_score_kernel` recomputes `p = exp(qk − lse)` head by head, adds the group's heads in registers, and folds
compressed blocks into selection blocks; the per-head `S × N` is never stored. `_top_kernel` keeps the best blocks of
each row. Scores are float32 throughout and are compared whole, ties to the lower index: the ids are the reference's
except where two scores differ by float32 rounding. Tokens are walked in chunks, so that few scores are held at once.

Shapes: B batch, S tokens, H heads, G groups, R = H/G, D head dim, N compressed blocks, J selection blocks.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention import reference
from tamis.attention.spec import FORCED_BLOCKS, NSASpec
from tamis.attention.tiles import LOG2E, padded, precision, tile_for, unit_last_stride

SCORE_BYTES = 128 << 20  # scores held at once
TOP_ELEMENTS = 4096  # scores a program of the second kernel holds in registers
MOST_KEYS = 256  # a selection block of more strides than this is left to the reference
WIDEST_ROW = 1024  # longer rows of scores are walked in pieces of this many blocks


@triton.jit(do_not_specialize=["B", "S", "N", "G", "columns", "t_begin", "t_end"])
def _score_kernel(
    q, k, lse, scores, stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg,
    B, S, N, G, columns, t_begin, t_end, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, JT: tl.constexpr,
):  # fmt: skip
    """Scores of JT selection blocks for BM tokens, all heads of a group; `scores` is [B,G,t_end−t_begin,columns]."""
    PIECES: tl.constexpr = L // STRIDE  # of a compressed block
    PIECES_SEL: tl.constexpr = L_SEL // STRIDE  # of a selection block
    bg = tl.program_id(0) % (B * G)
    tile = tl.cdiv(t_end - t_begin, BM) - 1 - tl.program_id(0) // (B * G)
    b, g = (bg // G).to(tl.int64), bg % G
    token = t_begin + tile * BM + tl.arange(0, BM)
    alive = token < t_end
    j_first = tl.program_id(1) * JT
    newest = (tl.minimum(t_begin + tile * BM + BM, t_end) - 1) // L_SEL
    # The two newest blocks are chosen anyway, later ones do not exist yet; early tokens take every block there is.
    if j_first <= newest - 2 and newest >= N_SEL:
        # Compressed blocks that touch these selection blocks begin up to PIECES − 1 before them.
        i = j_first * PIECES_SEL - (PIECES - 1) + tl.arange(0, BN)
        column = tl.arange(0, DP)
        inside = (i >= 0) & (i < N)
        at = k + b * stride_kb + g * stride_kg + i.to(tl.int64)[:, None] * stride_kn + column[None, :]
        k_tile = tl.load(at, mask=inside[:, None] & (column < D)[None, :], other=0.0)
        q += b * stride_qb + g * R * stride_qh
        lse += (b * G + g) * R * S
        at_q = q + token.to(tl.int64)[:, None] * stride_qs + column[None, :]
        mask_q = alive[:, None] & (column < D)[None, :]
        p = tl.zeros([BM, BN], tl.float32)
        for r in range(R):
            q_tile = tl.load(at_q + r * stride_qh, mask=mask_q, other=0.0)
            lse2 = tl.load(lse + r * S + token, mask=alive, other=0.0) * 1.4426950408889634
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            p += tl.exp2(s * scale - lse2[:, None])
        ended = tl.maximum((token + 1 - L + STRIDE) // STRIDE, 0)
        p = tl.where(inside[None, :] & (i[None, :] < ended[:, None]), p, 0.0)

        # overlap[i,j]: pieces of compressed block i that lie in selection block j.
        j = j_first + tl.arange(0, BJ)
        low = tl.maximum(i[:, None], j[None, :] * PIECES_SEL)
        high = tl.minimum(i[:, None] + PIECES, (j[None, :] + 1) * PIECES_SEL)
        overlap = tl.maximum(high - low, 0)
        if PRECISION == "ieee":
            score = tl.dot(p, overlap.to(tl.float32), input_precision="ieee")
        else:
            # Three bfloat16 parts hold all 24 bits of p, and the overlaps are small whole numbers: exact products.
            weight = overlap.to(tl.bfloat16)
            high_part = p.to(tl.bfloat16)
            rest = p - high_part.to(tl.float32)
            middle_part = rest.to(tl.bfloat16)
            low_part = (rest - middle_part.to(tl.float32)).to(tl.bfloat16)
            score = tl.dot(low_part, weight)
            score = tl.dot(middle_part, weight, score)
            score = tl.dot(high_part, weight, score)
        row = (b * G + g) * (t_end - t_begin) + token - t_begin
        stored = alive[:, None] & ((tl.arange(0, BJ) < JT) & (j < columns))[None, :]
        tl.store(scores + row[:, None] * columns + j[None, :], score, mask=stored)


@triton.jit(do_not_specialize=["B", "S", "G", "columns", "t_begin", "t_end"])
def _top_kernel(
    scores, ids, B, S, G, columns, t_begin, t_end,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """The N_SEL chosen blocks of BM tokens, ascending; `ids` is [B,S,G,N_SEL]."""
    FREE: tl.constexpr = N_SEL - 3  # chosen by score; block 0 and the two newest are chosen always
    UNUSED: tl.constexpr = 2147483647
    bg = tl.program_id(0) % (B * G)
    b, g = (bg // G).to(tl.int64), bg % G
    first = t_begin + tl.program_id(0) // (B * G) * BM
    token = first + tl.arange(0, BM)
    alive = token < t_end
    newest = token // L_SEL
    newest_last = (tl.minimum(first + BM, t_end) - 1) // L_SEL
    slot = tl.arange(0, NP)[None, :]
    # Best so far, as (score bits, inverted index): larger is better. Empty slots hold small distinct keys, the slots
    # past FREE the largest, so that neither is mistaken for a block.
    best = tl.where(slot < FREE, slot.to(tl.int64), 9223372036854775807) + tl.zeros([BM, NP], tl.int64)
    row = (b * G + g) * (t_end - t_begin) + token - t_begin
    if FREE > 0 and newest_last >= N_SEL:
        for piece in range(tl.cdiv(newest_last - 1, BJ)):
            j = piece * BJ + tl.arange(0, BJ)
            candidate = (j >= 1)[None, :] & (j[None, :] <= newest[:, None] - 2) & alive[:, None]
            value = tl.load(scores + row[:, None] * columns + j[None, :], mask=candidate, other=-1.0)
            for _ in range(FREE):
                top, at = tl.max(value, 1, return_indices=True, return_indices_tie_break_left=True)
                inverted = 2147483647 - (piece * BJ + at)
                key = (top.to(tl.int32, bitcast=True).to(tl.int64) << 32) | inverted.to(tl.int64)
                worst = tl.min(best, 1)
                better = (key > worst) & (top >= 0.0)
                best = tl.where((best == worst[:, None]) & better[:, None], key[:, None], best)
                value = tl.where(tl.arange(0, BJ)[None, :] == at[:, None], -1.0, value)
    by_score = 2147483647 - (best & 2147483647).to(tl.int32)
    forced = tl.where(slot == FREE, 0, tl.where(slot == FREE + 1, newest[:, None] - 1, newest[:, None]))
    chosen = tl.where(slot < FREE, by_score, forced)
    chosen = tl.where((newest < N_SEL)[:, None], tl.where(slot <= newest[:, None], slot, UNUSED), chosen)
    chosen = tl.sort(tl.where(slot < N_SEL, chosen, UNUSED))
    chosen = tl.where(chosen == UNUSED, -1, chosen)
    at_ids = ids + ((b * S + token) * G + g)[:, None] * N_SEL + slot
    tl.store(at_ids, chosen, mask=alive[:, None] & (slot < N_SEL))


def select_from_lse(q: Tensor, k_cmp: Tensor, lse: Tensor, spec: NSASpec) -> Tensor:
    """Ids `[B,S,G,n_sel]` int32, ascending, unused ones −1 at the end; `lse` is the compressed branch's `[B,H,S]`."""
    q, k_cmp = unit_last_stride(q), unit_last_stride(k_cmp)
    B, S, H, D = q.shape
    N, G = k_cmp.shape[1], k_cmp.shape[2]
    tile = tile_for("score", padded(D), q.dtype)
    touching = spec.pieces_per_selected + spec.pieces_per_compressed - 1  # compressed blocks per selection block
    keys = max(tile.keys, triton.next_power_of_2(touching))
    if keys > MOST_KEYS:
        return reference.select_blocks(q, k_cmp, spec)
    per_tile = (keys - spec.pieces_per_compressed + 1) // spec.pieces_per_selected
    ids = torch.empty(B, S, G, spec.n_sel, dtype=torch.int32, device=q.device)
    for t_begin, t_end in _chunks(B, S, G, spec):
        columns = spec.selection_blocks(t_end)
        scores = torch.empty(B, G, t_end - t_begin, columns, dtype=torch.float32, device=q.device)
        if columns > spec.n_sel > FORCED_BLOCKS:
            grid = (triton.cdiv(t_end - t_begin, tile.rows) * B * G, triton.cdiv(columns, per_tile))
            _score_kernel[grid](
                q, k_cmp, lse, scores, *q.stride()[:3], *k_cmp.stride()[:3], B, S, N, G, columns, t_begin, t_end,
                D**-0.5 * LOG2E, L=spec.l, STRIDE=spec.d, L_SEL=spec.l_sel, N_SEL=spec.n_sel,
                R=H // G, D=D, DP=padded(D), PRECISION=precision(q.dtype), BM=tile.rows, BN=keys,
                BJ=max(16, triton.next_power_of_2(per_tile)), JT=per_tile, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        width = min(WIDEST_ROW, max(16, triton.next_power_of_2(columns)))
        rows = max(1, TOP_ELEMENTS // max(width, spec.n_sel))
        _top_kernel[(triton.cdiv(t_end - t_begin, rows) * B * G,)](
            scores, ids, B, S, G, columns, t_begin, t_end, L_SEL=spec.l_sel, N_SEL=spec.n_sel,
            NP=triton.next_power_of_2(spec.n_sel), BM=triton.next_power_of_2(rows), BJ=width, num_warps=4,
        )  # fmt: skip
    return ids


def _chunks(B: int, S: int, G: int, spec: NSASpec) -> list[tuple[int, int]]:
    """Token ranges whose scores fit in SCORE_BYTES: `tokens · columns of the last token ≤ budget`."""
    bounds, begin, budget = [], 0, SCORE_BYTES // (4 * B * G)
    while begin < S:
        size = S - begin
        while size > 128 and size * spec.selection_blocks(begin + size) > budget:
            size = max(128, size // 2)
        bounds.append((begin, begin + size))
        begin += size
    return bounds
