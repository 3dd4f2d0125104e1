"""Triton: which blocks each query and group attends to, from the queries, the compressed keys and their log-sum-exp.

`_score_kernel` holds the queries of all heads of a few tokens and walks the keys: it recomputes `p = exp(qk − lse)`,
adds the group's heads, folds compressed blocks into selection blocks, and stores the scores in runs of a few blocks,
with the best of each run; the per-head `S × N` is never stored. `best_blocks.py` then chooses. Scores are float32
throughout and are compared whole, ties to the lower index: the ids are the reference's except where two scores differ
by float32 rounding. Tokens are walked in chunks, so that few scores are held at once.

Shapes: B batch, S queries, the first at position `start`, H heads, G groups, R = H/G, D head dim, N compressed blocks;
`RUN` blocks to a run. A kernel that gets None for `start` is compiled without it. Scores of a packed row count blocks
from the document of the token; its ids count from the first block of the row.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.checks import check_branch, check_rows, compressed_blocks
from tamis.attention.kernels.banded.queries import described_keys, keys_ended
from tamis.attention.kernels.best_blocks import choose_blocks
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedKernel,
    cdiv,
    copies_tiles,
    next_power_of_2,
    padded,
    precision,
    read_start,
    softmax_scale,
    specializes_warps,
    start_argument,
    tile_for,
    unit_last_stride,
)  # fmt: skip
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import PackedTables
from tamis.attention.spec import FORCED_BLOCKS, NSASpec, Start, latest_start

SCORE_BYTES = 512 << 20  # scores held at once; the backward pass holds more
HELD_BYTES = 100 << 10  # queries of all heads of a tile of tokens stay in shared memory while the keys are walked
PROGRAMS_OF_SCORES = 1024  # where tokens make fewer, as in a chunk of a very long sequence, programs share its runs
KEYS_IN_GLUON = 64  # of a run of `hopper/scores.py`


@triton.jit
def _upper_half(x):
    """The number without the lower 16 of its 32 bits."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _fold(p, overlap, EXACT: tl.constexpr):
    """`p @ overlap` in float32, on tensor cores if EXACT is not asked of the ordinary ones."""
    if EXACT:
        return tl.dot(p, overlap.to(tl.float32), input_precision="ieee")
    # Three bfloat16 parts hold all 24 bits of p, and overlaps are small whole numbers: every product is exact. The
    # parts are cut off, not rounded: a mask and a difference, where rounding takes the unit that exponentials need.
    weight = overlap.to(tl.bfloat16)
    upper = _upper_half(p)
    rest = p - upper
    middle = _upper_half(rest)
    low = (rest - middle).to(tl.bfloat16)
    high, middle = upper.to(tl.bfloat16), middle.to(tl.bfloat16)
    return tl.dot(high, weight, tl.dot(middle, weight, tl.dot(low, weight)))


@triton.jit
def _overlap(part, PIECES: tl.constexpr, PIECES_SEL: tl.constexpr, BN: tl.constexpr, RUN_P2: tl.constexpr):
    """How many pieces of each of BN compressed blocks lie in each selection block of a run: the same for every run."""
    piece = (part * BN + tl.arange(0, BN) - (PIECES - 1))[:, None]
    block = tl.arange(0, RUN_P2)[None, :]
    end = tl.minimum(piece + PIECES, (block + 1) * PIECES_SEL)
    return tl.maximum(end - tl.maximum(piece, block * PIECES_SEL), 0)


@triton.jit
def _part_of_scores(
    run, part, overlap, q_tiles, lse_rows, k, b, g, first_key, ended, N, scale, stride_kn,
    PIECES: tl.constexpr, PIECES_SEL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RUN: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """What BN of the compressed blocks that touch a run add to its scores, row by row of the products."""
    column = tl.arange(0, DP)
    # Compressed blocks that touch these selection blocks begin up to PIECES − 1 before them.
    first = run * RUN * PIECES_SEL - (PIECES - 1) + part * BN
    i = first + tl.arange(0, BN)
    inside = (i >= 0) & (i < N)
    if COPIED:
        k_tile = tl.reshape(k.load([b, first_key + first, g, 0]), [BN, DP])
    else:
        at_k = k + (first_key + i).to(tl.int64)[:, None] * stride_kn + column[None, :]
        k_tile = tl.load(at_k, mask=inside[:, None] & (column < D)[None, :], other=0.0)
    s = tl.dot(q_tiles[0], tl.trans(k_tile), input_precision=PRECISION)
    p = tl.exp2(s * scale - lse_rows[0][:, None])
    for held in tl.static_range(1, len(q_tiles)):
        s = tl.dot(q_tiles[held], tl.trans(k_tile), input_precision=PRECISION)
        p += tl.exp2(s * scale - lse_rows[held][:, None])
    if PIECES <= PIECES_SEL + 1:
        # A block that can be chosen touches only keys the row sees; other keys must not add 0·inf to its score.
        p = tl.minimum(p, 1e30)
    else:
        p = tl.where(inside[None, :] & (i[None, :] < ended[:, None]), p, 0.0)
    return _fold(p, overlap, PRECISION == "ieee")


@PreparedKernel
@triton.jit(do_not_specialize=["B", "S", "N", "G", "start", "runs", "t_begin", "t_end"])
def _score_kernel(
    q, k, lse, scores, best_of_run, token_table,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg,
    B, S, N, G, start, runs, t_begin, t_end, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr,
    RUN_P2: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Scores of BT tokens, all heads of a group: `scores` [B,G,T,runs,RUN_P2] and `best_of_run` [B,G,T,runs]."""
    PIECES: tl.constexpr = L // STRIDE  # of a compressed block
    PIECES_SEL: tl.constexpr = L_SEL // STRIDE  # of a selection block
    BM: tl.constexpr = BT * HEADS
    bg = tl.program_id(0) % (B * G)
    tile = tl.cdiv(t_end - t_begin, BT) - 1 - tl.program_id(0) // (B * G)  # longest first
    b, g = (bg // G).to(tl.int64), bg % G
    row = tl.arange(0, BM)  # of a product: HEADS heads of BT tokens, token by token: they are added within a warp
    token, head = t_begin + tile * BT + row // HEADS, row % HEADS
    alive = token < t_end
    last, position = tl.minimum(t_begin + tile * BT + BT, t_end) - 1, token
    t = t_begin + tile * BT + tl.arange(0, BT)
    position_t = t
    if start is not None:
        start = read_start(start)
        last, position, position_t = last + start, position + start, position_t + start
    newest = last // L_SEL
    # The two newest blocks are chosen anyway, later ones do not exist yet; early tokens take every block there is.
    wanted = tl.where(newest < N_SEL, 0, tl.cdiv(newest - 1, RUN))
    column = tl.arange(0, DP)
    if not COPIED:
        k += b * stride_kb + g * stride_kg
    lse += (b * G + g) * R * S
    at_q = q + b * stride_qb + g * R * stride_qh + token.to(tl.int64)[:, None] * stride_qs
    at_q = at_q + head[:, None] * stride_qh + column[None, :]
    ended = tl.maximum((position + 1 - L + STRIDE) // STRIDE, 0)
    at_row = ((b * G + g) * (t_end - t_begin) + t - t_begin) * runs
    overlap = _overlap(0, PIECES, PIECES_SEL, BN, RUN_P2)
    q_tiles = ()
    lse_rows = ()
    for r in tl.static_range(0, R, HEADS):
        there = alive if R % HEADS == 0 else alive & (r + head < R)
        mask_q = there[:, None] & (column < D)[None, :]
        q_tiles += (tl.load(at_q + r * stride_qh, mask=mask_q, other=0.0),)
        no_weight = 0.0 if R % HEADS == 0 else float("inf")  # of a head that is none; tokens not alive are not stored
        lse_rows += (tl.load(lse + (r + head) * S + token, mask=there, other=no_weight) * 1.4426950408889634,)

    if token_table is None:
        _score_runs(
            overlap, q_tiles, lse_rows, k, bg, g, G, 0, ended, N, scale, stride_kn, scores, best_of_run, at_row,
            position_t, t, None, t_end, wanted,
            L_SEL, PIECES, PIECES_SEL, D, DP, PRECISION, BT, HEADS, BN, PARTS, RUN, RUN_P2, COPIED,
        )  # fmt: skip
    else:
        at = t_begin + tile * BT
        while at <= last:  # document by document
            first_token, end_token = tl.load(token_table + at * 4), tl.load(token_table + at * 4 + 1)
            first_key, keys = tl.load(token_table + at * 4 + 3), keys_ended(end_token - first_token - 1, L, STRIDE)
            newest_here = (tl.minimum(last, end_token - 1) - first_token) // L_SEL
            wanted_here = tl.where(newest_here < N_SEL, 0, tl.minimum(tl.cdiv(newest_here - 1, RUN), runs))
            ended_here = tl.maximum((token - first_token + 1 - L + STRIDE) // STRIDE, 0)
            _score_runs(
                overlap, q_tiles, lse_rows, k, bg, g, G, first_key, ended_here, keys, scale, stride_kn,
                scores, best_of_run, at_row, t - first_token, t, first_token, tl.minimum(t_end, end_token), wanted_here,
                L_SEL, PIECES, PIECES_SEL, D, DP, PRECISION, BT, HEADS, BN, PARTS, RUN, RUN_P2, COPIED,
            )  # fmt: skip
            at = end_token


@triton.jit
def _score_runs(
    overlap, q_tiles, lse_rows, k, bg, g, G, first_key, ended, N, scale, stride_kn, scores, best_of_run, at_row,
    position, t, first_token, t_end, wanted, L_SEL: tl.constexpr, PIECES: tl.constexpr, PIECES_SEL: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, HEADS: tl.constexpr,
    BN: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, RUN_P2: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Store the scores of one document's runs for tokens first_token…t_end−1; its keys begin at `first_key`."""
    BM: tl.constexpr = BT * HEADS
    for run in range(tl.program_id(1), wanted, tl.num_programs(1)):
        score = _part_of_scores(
            run, 0, overlap, q_tiles, lse_rows, k, bg // G, g, first_key, ended, N, scale, stride_kn,
            PIECES, PIECES_SEL, D, DP, PRECISION, BM, BN, RUN, COPIED,
        )  # fmt: skip
        for part in range(1, PARTS):
            score += _part_of_scores(
                run, part, _overlap(part, PIECES, PIECES_SEL, BN, RUN_P2), q_tiles, lse_rows, k, bg // G, g, first_key,
                ended, N, scale, stride_kn, PIECES, PIECES_SEL, D, DP, PRECISION, BM, BN, RUN, COPIED,
            )  # fmt: skip
        # Always true, but the compiler does not know it; what is in an `if` comes after the copy of the next keys.
        if (not COPIED) or run < wanted:
            alive = t < t_end
            if first_token is not None:
                alive = alive & (t >= first_token)
            _store_scores(score, run, scores, best_of_run, at_row, position, alive, L_SEL, BT, HEADS, RUN, RUN_P2)


@triton.jit
def _store_scores(
    score, run, scores, best_of_run, at_row, position, alive,
    L_SEL: tl.constexpr, BT: tl.constexpr, HEADS: tl.constexpr, RUN: tl.constexpr, RUN_P2: tl.constexpr,
):  # fmt: skip
    """Add up a product's heads; store the scores of a run, −1 where a block is not chosen by score, and the best."""
    j = run * RUN + tl.arange(0, RUN_P2)
    if HEADS > 1:
        score = tl.sum(tl.reshape(score, [BT, HEADS, RUN_P2]), 1)
    at = scores + (at_row + run)[:, None] * RUN_P2 + tl.arange(0, RUN_P2)[None, :]
    eligible = (j >= 1) & (tl.arange(0, RUN_P2) < RUN)
    score = tl.where(eligible[None, :] & (j[None, :] <= position[:, None] // L_SEL - 2), score, -1.0)
    tl.store(best_of_run + at_row + run, tl.max(score, 1), mask=alive)
    tl.store(at, score, mask=alive[:, None])


def select_from_lse(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    start: Start = 0,
    trusted: bool = False,
    packed: PackedTables | None = None,
    scale: float | None = None,
) -> Tensor:
    """Ids `[B,S,G,n_sel]` int32, ascending, unused ones −1 at the end; `lse` is the compressed branch's `[B,H,S]`."""
    latest = latest_start(start)
    if not trusted:
        check_branch(q, compressed_blocks(q, spec, latest), k_cmp=k_cmp)
        check_rows(q, lse=lse)
    q, k_cmp = unit_last_stride(q), unit_last_stride(k_cmp)
    B, S, H, D = q.shape
    N, G = k_cmp.shape[1], k_cmp.shape[2]
    tile = tile_for("score", q, H // G)
    in_gluon = walks_heads(q, k_cmp, spec, start, packed)
    parts, run = runs_of(KEYS_IN_GLUON if in_gluon else tile.keys, spec)
    run_p2 = max(16, next_power_of_2(run))
    ids = empty((B, S, G, spec.n_sel), torch.int32, q.device)
    table = packed.token if packed else None
    for t_begin, t_end in _chunks(B, S, G, spec, latest, packed.longest if packed else None):
        blocks = spec.selection_blocks(packed.longest if packed else latest + t_end)
        runs = cdiv(blocks, run)
        scores = empty((B, G, t_end - t_begin, runs, run_p2), torch.float32, q.device)
        best_of_run = empty(scores.shape[:4], torch.float32, q.device)
        if blocks > spec.n_sel > FORCED_BLOCKS and in_gluon:
            from tamis.attention.kernels.hopper.scores import write_scores  # here: not every Triton has Gluon

            write_scores(
                q, k_cmp, lse, scores, best_of_run, t_begin, t_end, softmax_scale(q, scale) * LOG2E,
                spec.pieces_per_compressed, spec.pieces_per_selected, spec.l_sel, spec.n_sel, run,
            )  # fmt: skip
        elif blocks > spec.n_sel > FORCED_BLOCKS:
            copied = copies_tiles(H // G, k_cmp)
            keys = described_keys(k_cmp, tile.keys, copied)
            tokens = tokens_held(H // G, tile.rows, padded(D) * q.element_size())
            programs = cdiv(t_end - t_begin, tokens) * B * G
            _score_kernel[(programs, max(1, min(runs, PROGRAMS_OF_SCORES // programs)))](
                q, keys, lse, scores, best_of_run, table, *q.stride()[:3], *k_cmp.stride()[:3],
                B, S, N, G, start_argument(start), runs, t_begin, t_end, softmax_scale(q, scale) * LOG2E,
                L=spec.l, STRIDE=spec.d, L_SEL=spec.l_sel, N_SEL=spec.n_sel, R=H // G, D=D, DP=padded(D),
                PRECISION=precision(q.dtype), BT=tokens, HEADS=tile.rows // tokens, BN=tile.keys, PARTS=parts,
                RUN=run, RUN_P2=run_p2, COPIED=copied, **tile.options,
            )  # fmt: skip
        choose_blocks(scores, best_of_run, ids, table, start, t_begin, t_end, spec, run)
    return ids


def walks_heads(
    q: Tensor, k_cmp: Tensor, spec: NSASpec, start: Start = 0, packed: PackedTables | None = None
) -> bool:  # fmt: skip
    """Whether `hopper/scores.py` has the kernel for these: a run takes one tile of keys, and has at most 16 blocks."""
    parts, run = runs_of(KEYS_IN_GLUON, spec)
    narrow = parts == 1 and run <= 16 and spec.pieces_per_compressed <= spec.pieces_per_selected + 1
    whole = start_argument(start) is None and packed is None
    return whole and narrow and specializes_warps(q, k_cmp, dims=(128,))


def tokens_held(heads: int, rows: int, row_bytes: int) -> int:
    """How many tokens, at most the rows of a product, can have their queries of all heads held."""
    tokens = rows
    while tokens > 1 and heads * tokens * row_bytes > HELD_BYTES:
        tokens //= 2
    return tokens


def runs_of(keys: int, spec: NSASpec) -> tuple[int, int]:
    """How many tiles of `keys` compressed blocks a run takes, and how many selection blocks it holds.

    A wide selection block takes several tiles, never a wider one: with 128 keys at head dim 128 a GPU faulted.
    """
    touching = spec.pieces_per_selected + spec.pieces_per_compressed - 1  # compressed blocks per selection block
    parts = cdiv(touching, keys)
    return parts, (parts * keys - spec.pieces_per_compressed + 1) // spec.pieces_per_selected


def _chunks(B: int, S: int, G: int, spec: NSASpec, start: int = 0, longest: int | None = None) -> list[tuple[int, int]]:
    """Query ranges whose scores fit in SCORE_BYTES: `tokens · columns of the last token ≤ budget`."""
    bounds, begin, budget = [], 0, SCORE_BYTES // (4 * B * G)
    while begin < S:
        size = S - begin
        while size > 128 and size * spec.selection_blocks(longest or start + begin + size) > budget:
            size = max(128, size // 2)
        bounds.append((begin, begin + size))
        begin += size
    return bounds
