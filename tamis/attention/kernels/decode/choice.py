"""Triton: which blocks one query attends to, from the logits that a scan of the compressed keys left.

Every program that walks selected tokens repeats this choice, so it must be quick: whole vectors are read without
masks, and of the scores only the best runs are sorted. Logits and log-sum-exps are in base 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

UNUSED = tl.constexpr(2147483647)  # a slot without a block


@triton.jit
def _branch_lse(part_lse, splits, R: tl.constexpr, RH: tl.constexpr, XP: tl.constexpr):
    """Log-sum-exp of each head over the splits of a branch; 0 where it saw nothing, so that weights come out 0."""
    x = tl.arange(0, XP)
    r = tl.arange(0, RH)
    mask = (x < splits)[:, None] & (r < R)[None, :]
    lse = tl.load(part_lse + x[:, None] * R + r[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg")
    m = tl.max(lse, 0)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2(lse - m_safe[None, :]), 0)
    return tl.where(total > 0.0, m_safe + tl.log2(tl.where(total > 0.0, total, 1.0)), 0.0)


@triton.jit
def _best(keys, NP: tl.constexpr):
    """The NP largest of different keys, largest first.

    A key among them lies in a run whose largest is among the NP largest of runs, so only these are sorted.
    """
    RUNS: tl.constexpr = 4 * NP
    RUN: tl.constexpr = keys.shape[0] // RUNS
    if RUN > 1:
        largest = tl.max(tl.reshape(keys, [RUNS, RUN]), 1)
        rank = tl.sum((largest[None, :] > largest[:, None]).to(tl.int32), 1)
        run = tl.sum(tl.where(rank[None, :] == tl.arange(0, NP)[:, None], tl.arange(0, RUNS)[None, :], 0), 1)
        keys = tl.gather(keys, tl.reshape(run[:, None] * RUN + tl.arange(0, RUN)[None, :], [NP * RUN]), 0)
    return tl.topk(keys, NP)


@triton.jit
def _best_blocks(logits, lse, row_length, blocks, newest, PIECES: tl.constexpr, PIECES_SEL: tl.constexpr,
                 R: tl.constexpr, RH: tl.constexpr, NP: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """Ids of the NP best-scored blocks among 1 … newest−2, best first; meaningless where there are fewer."""
    best = -1 - tl.arange(0, NP).to(tl.int64)
    SP: tl.constexpr = triton.next_power_of_2(PIECES_SEL)
    piece = tl.arange(0, SP)
    # How many pieces of block j lie in the compressed block that begins at each of its own.
    overlap = tl.where(piece < PIECES_SEL, tl.minimum(PIECES, PIECES_SEL - piece), 0).to(tl.float32)
    for first in range(0, newest - 1, BJ):
        j = first + tl.arange(0, BJ)
        i = j[:, None] * PIECES_SEL + piece[None, :]
        within = tl.zeros([BJ, SP], tl.float32)
        score = tl.zeros([BJ], tl.float32)
        # Not masked, so that whole vectors are read: what lies outside is allocated, and left out below.
        for r in tl.range(0, R, loop_unroll_factor=2):
            lse_r = tl.sum(tl.where(tl.arange(0, RH) == r, lse, 0.0), 0)
            row = logits + r * row_length
            within += tl.exp2(tl.load(row + i) - lse_r)
            for before in tl.static_range(1, PIECES):  # compressed blocks that begin before j and reach into it
                p = tl.exp2(tl.load(row + j * PIECES_SEL - before) - lse_r)
                score += tl.where(j * PIECES_SEL >= before, p, 0.0) * min(PIECES - before, PIECES_SEL)
        score += tl.sum(tl.where(i < blocks, within, 0.0) * overlap[None, :], 1)
        # (score bits, inverted index): a larger key is a better block, ties go to the lower index.
        key = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - j).to(tl.int64)
        candidate = (j >= 1) & (j <= newest - 2)
        found = _best(tl.where(candidate, key, -1 - NP - j.to(tl.int64)), NP)
        if first > 0:
            found = tl.topk(tl.reshape(tl.join(best, found), [2 * NP]), NP)
        best = found
    return 2147483647 - (best & 2147483647).to(tl.int32)


@triton.jit
def chosen_blocks(logits, part_lse, position, x_cmp, row_length, L: tl.constexpr, STRIDE: tl.constexpr,
                  L_SEL: tl.constexpr, N_SEL: tl.constexpr, R: tl.constexpr, RH: tl.constexpr, NP: tl.constexpr,
                  BJ: tl.constexpr, XP: tl.constexpr):  # fmt: skip
    """`[NP]` block ids, ascending, UNUSED at the end."""
    FREE: tl.constexpr = N_SEL - 3  # chosen by score; block 0 and the two newest are chosen always
    newest = position // L_SEL
    slot = tl.arange(0, NP)
    chosen = tl.where((slot <= newest) & (slot < N_SEL), slot, UNUSED)  # early queries take every block there is
    if newest >= N_SEL:
        chosen = tl.where(slot == FREE, 0, tl.where(slot == FREE + 1, newest - 1, newest))
        if FREE > 0:
            lse = _branch_lse(part_lse, x_cmp, R, RH, XP)
            blocks = tl.maximum((position + 1 - L + STRIDE) // STRIDE, 0)
            best = _best_blocks(logits, lse, row_length, blocks, newest, L // STRIDE, L_SEL // STRIDE, R, RH, NP, BJ)
            chosen = tl.where(slot < FREE, best, chosen)
        chosen = tl.sort(tl.where(slot < N_SEL, chosen, UNUSED))
    return chosen
