"""Triton: the blocks that each token attends to, from their scores in runs of a few blocks, and the best of each run.

The kernel takes one block after the other from the run whose best is highest, and reads no other run. Shapes and names
are those of `selection.py`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import PreparedKernel, cdiv, next_power_of_2, read_start, start_argument
from tamis.attention.spec import NSASpec, Start, latest_start

TOP_RUNS = 2048  # runs one warp looks through at a time: few lanes to a row, few shuffles
RUNS_OF_TILES = 128  # least room for runs in a prompt's later tiles: nothing is recompiled as the prompt grows


@triton.jit
def _best_blocks(
    best, scores, row, runs, COUNT: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr, RUN_P2: tl.constexpr,
    UNUSED: tl.constexpr,
):  # fmt: skip
    """The COUNT best blocks of each row, the lower one first among equals; `best` holds the best score of each run.

    Each round takes the best block of the best run and looks for that run's next. Equal scores are taken from the
    lowest block on, so a run's higher scores, and equal ones of lower blocks, have been taken before.
    """
    run = tl.arange(0, best.shape[1])[None, :]
    inner = tl.arange(0, RUN_P2)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.full([best.shape[0], SLOTS], UNUSED, tl.int32)
    last_top, last_block = tl.zeros([best.shape[0]], tl.float32), tl.zeros([best.shape[0]], tl.int32)
    for rank in range(COUNT):
        top = tl.max(best, 1)
        at_run = tl.min(tl.where(best == top[:, None], run, UNUSED), 1)
        there = (top >= 0.0) & (at_run < UNUSED)
        at = (row * runs + at_run)[:, None] * RUN_P2 + inner
        score = tl.load(scores + at, mask=there[:, None], other=-1.0)
        block = at_run[:, None] * RUN + inner
        left = (score == top[:, None]) & ((top < last_top)[:, None] | (block > last_block[:, None]))
        last_block = tl.min(tl.where(left, block, UNUSED), 1)
        last_top = top
        found = tl.where((slot == rank) & there[:, None], last_block[:, None], found)
        left = (score < top[:, None]) | (left & (block > last_block[:, None]))
        best = tl.where(run == at_run[:, None], tl.max(tl.where(left, score, -1.0), 1)[:, None], best)
    return found


@PreparedKernel
@triton.jit(do_not_specialize=["B", "S", "G", "start", "runs", "t_begin", "t_end"])
def _top_kernel(
    scores, best_of_run, ids, token_table, B, S, G, start, runs, t_begin, t_end,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr, RUN_P2: tl.constexpr,
    RUNS_P2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The N_SEL chosen blocks of BM tokens, ascending; `ids` is [B,S,G,N_SEL]."""
    FREE: tl.constexpr = N_SEL - 3  # chosen by score; block 0 and the two newest are chosen always
    UNUSED: tl.constexpr = 2147483647
    bg = tl.program_id(0) % (B * G)
    b, g = (bg // G).to(tl.int64), bg % G
    first = t_begin + tl.program_id(0) // (B * G) * BM
    token = first + tl.arange(0, BM)
    alive = token < t_end
    position = token
    if start is not None:
        start = read_start(start)
        position += start
    if token_table is not None:
        position -= tl.load(token_table + token * 4, mask=alive, other=0)
    newest = position // L_SEL
    row = (b * G + g) * (t_end - t_begin) + token - t_begin
    slot = tl.arange(0, SLOTS)[None, :]
    by_score = tl.full([BM, SLOTS], UNUSED, tl.int32)
    last = tl.minimum(first + BM, t_end) - 1
    if start is not None:
        last += start
    if token_table is not None:
        last = tl.max(tl.where(alive, position, 0), 0)
    if FREE > 0 and last // L_SEL >= N_SEL:
        run = tl.arange(0, RUNS_P2)[None, :]
        there = alive[:, None] & (run * RUN <= newest[:, None] - 2)
        best = tl.load(best_of_run + row[:, None] * runs + run, mask=there, other=-1.0)
        by_score = _best_blocks(best, scores, row, runs, FREE, SLOTS, RUN, RUN_P2, UNUSED)
    forced = tl.where(slot == FREE, 0, tl.where(slot == FREE + 1, newest[:, None] - 1, newest[:, None]))
    chosen = tl.where(slot < FREE, by_score, forced)
    every = tl.where(slot <= newest[:, None], slot, UNUSED)  # where there are no more than N_SEL
    chosen = tl.where((newest < N_SEL)[:, None], every, chosen)
    chosen = tl.sort(tl.where(slot < N_SEL, chosen, UNUSED))
    chosen = tl.where(chosen == UNUSED, -1, chosen)
    if token_table is not None:
        first_block = tl.load(token_table + token * 4 + 2, mask=alive, other=0)
        chosen = tl.where(chosen >= 0, chosen + first_block[:, None], -1)
    at_ids = ids + ((b * S + token) * G + g)[:, None] * N_SEL + slot
    tl.store(at_ids, chosen, mask=alive[:, None] & (slot < N_SEL))


def choose_blocks(
    scores: Tensor, best_of_run: Tensor, ids: Tensor, table: Tensor | None, start: Start, t_begin: int, t_end: int,
    spec: NSASpec, run: int,
) -> None:  # fmt: skip
    """Write the ids of tokens t_begin…t_end−1, whose `scores` are `[B,G,tokens,runs,blocks of a run]`."""
    B, G, tokens, runs, run_p2 = scores.shape
    runs_p2 = max(next_power_of_2(runs), RUNS_OF_TILES if latest_start(start) else 1)
    rows = rows_of_top(runs_p2)
    _top_kernel[(cdiv(tokens, rows) * B * G,)](
        scores, best_of_run, ids, table, B, ids.shape[1], G, start_argument(start), runs, t_begin, t_end,
        L_SEL=spec.l_sel, N_SEL=spec.n_sel, SLOTS=next_power_of_2(spec.n_sel), RUN=run, RUN_P2=run_p2,
        RUNS_P2=runs_p2, BM=rows, num_warps=1,
    )  # fmt: skip


def rows_of_top(runs: int) -> int:
    """Tokens of a program of the second kernel, by the runs it looks through for each: eight or one.

    With two or four, the lanes that hold a token's scores are no neighbours, and Triton 3.6 leaves half of them out of
    a maximum: the kernel then misses every second run.
    """
    return 8 if 8 * runs <= TOP_RUNS else 1
