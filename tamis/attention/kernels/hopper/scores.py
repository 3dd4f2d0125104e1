"""Gluon: scores of the selection blocks on Hopper at head dim 128, where `walks_heads` of `selection.py` holds.

As in `boxes.py` one warp of a program does nothing but copy. Four groups of four warps multiply. Each holds the
compressed keys of one run of selection blocks, and all walk the queries of 64 tokens, head by head. A thread adds up
the weights of all heads in its registers, so they are folded into selection blocks once, not once for a few heads.

`selection.py` has the same in Triton for other shapes and GPUs, and defines runs, scores and their places.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tamis.attention.kernels.hopper.barriers import barriers_of_ring
from tamis.attention.kernels.hopper.descriptors import described_boxes
from tamis.attention.kernels.launch import PreparedKernel, cdiv

STAGES = 4
PROGRAMS_WANTED = 1024  # where tokens make fewer, programs share their runs


@gluon.jit
def _runs_of_tile(tile, t_begin, t_end, L_SEL: gl.constexpr, N_SEL: gl.constexpr, RUN: gl.constexpr):
    """How many runs the last of 64 tokens chooses from by score; early tokens take every block there is."""
    newest = (gl.minimum(t_begin + tile * 64 + 64, t_end) - 1) // L_SEL
    return gl.where(newest < N_SEL, 0, (newest - 1 + RUN - 1) // RUN)


@gluon.jit
def _copy_queries_and_keys(
    q, k, shared, b, g, t0, wanted,
    R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KEYS_OF_RUN: gl.constexpr, SKIPPED: gl.constexpr,
):  # fmt: skip
    held, ring, _overlaps, full, empty, held_full, held_empty = shared
    copied = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    for first in range(gl.program_id(1) * 4, wanted, gl.num_programs(1) * 4):
        buffer = taken % 2
        bar = held_full.index(buffer)
        mbarrier.wait(held_empty.index(buffer), (taken // 2 + 1) & 1)
        mbarrier.expect(bar, 4 * 64 * D * 2)
        for i in gl.static_range(4):
            at = [b, (first + i) * KEYS_OF_RUN - SKIPPED, g, 0]
            tma.async_copy_global_to_shared(k, at, bar, held.index(buffer * 4 + i))
        for r in range(R):
            slot = copied % STAGES
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), (copied // STAGES + 1) & 1)
            mbarrier.expect(bar, 64 * D * 2)
            tma.async_copy_global_to_shared(q, [b, t0, g * R + r, 0], bar, ring.index(slot))
            copied += 1
        taken += 1


@gluon.jit
def _score(
    lse, scores, best_of_run, shared, row_of_group, t0, t_begin, t_end, S, runs, wanted, scale,
    R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, L_SEL: gl.constexpr, RUN: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Scores of 64 tokens and of every fourth run."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    FOLDED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=FOLDED, k_width=2)
    held, ring, overlaps, full, empty, held_full, held_empty = shared
    zero = gl.zeros([64, 64], gl.float32, ACC)
    none = gl.zeros([64, 16], gl.float32, FOLDED)
    at_lse = lse + gl.minimum(t0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)), S - 1)
    token = t0 + gl.arange(0, 64, layout=gl.SliceLayout(1, FOLDED))
    row = (row_of_group + token - t_begin) * runs
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, FOLDED))
    walked = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    for first in range(gl.program_id(1) * 4, wanted, gl.num_programs(1) * 4):
        run = first + GROUP
        buffer = taken % 2
        mbarrier.wait(held_full.index(buffer), (taken // 2) & 1)
        keys = held.index(buffer * 4 + GROUP).reshape([64, D]).permute((1, 0))
        weights = gl.zeros([64, 64], gl.float32, ACC)
        for r in range(R):
            slot = walked % STAGES
            top = gl.load(at_lse + r * S) * 1.4426950408889634
            mbarrier.wait(full.index(slot), (walked // STAGES) & 1)
            if run < wanted:
                s = warpgroup_mma(ring.index(slot).reshape([64, D]), keys, zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                weights += gl.exp2(s * scale - top[:, None])
            mbarrier.arrive(empty.index(slot))
            walked += 1
        mbarrier.arrive(held_empty.index(buffer))
        taken += 1
        if run < wanted:
            # Three bfloat16 parts hold all 24 bits, and overlaps are small whole numbers: every product is exact.
            weights = gl.minimum(weights, 1e30)
            high = weights.to(gl.bfloat16)
            weights = weights - high.to(gl.float32)
            middle = weights.to(gl.bfloat16)
            low = (weights - middle.to(gl.float32)).to(gl.bfloat16)
            score = warpgroup_mma(gl.convert_layout(low, LEFT), overlaps, none, use_acc=False, is_async=True)
            score = warpgroup_mma(gl.convert_layout(middle, LEFT), overlaps, score, is_async=True)
            score = warpgroup_mma(gl.convert_layout(high, LEFT), overlaps, score, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score,))
            block = run * RUN + inner
            eligible = (block >= 1) & (inner < RUN)
            score = gl.where(eligible[None, :] & (block[None, :] <= token[:, None] // L_SEL - 2), score, -1.0)
            gl.store(best_of_run + row + run, gl.max(score, 1), mask=token < t_end)
            gl.store(scores + (row + run)[:, None] * 16 + inner[None, :], score, mask=(token < t_end)[:, None])


@gluon.jit
def _store_overlaps(overlaps, PIECES: gl.constexpr, PIECES_SEL: gl.constexpr):
    """How many pieces of each of 64 compressed blocks lie in each selection block of a run."""
    WRITE: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    piece = (gl.arange(0, 64, layout=gl.SliceLayout(1, WRITE)) - (PIECES - 1))[:, None]
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, WRITE))[None, :]
    end = gl.minimum(piece + PIECES, (block + 1) * PIECES_SEL)
    overlaps.store(gl.maximum(end - gl.maximum(piece, block * PIECES_SEL), 0).to(gl.bfloat16))


@PreparedKernel
@gluon.jit(do_not_specialize=["B", "S", "G", "runs", "t_begin", "t_end"])
def score_by_head(
    lse, scores, best_of_run, q, k, B, S, G, runs, t_begin, t_end, scale,
    PIECES: gl.constexpr, PIECES_SEL: gl.constexpr, L_SEL: gl.constexpr, N_SEL: gl.constexpr,
    R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """As `_score_kernel` from position 0 on; q and k are descriptors of 64 tokens or keys of one head."""
    bg = gl.program_id(0) % (B * G)
    tile = (t_end - t_begin + 63) // 64 - 1 - gl.program_id(0) // (B * G)  # longest first
    b, g = bg // G, bg % G
    t0 = t_begin + tile * 64
    wanted = _runs_of_tile(tile, t_begin, t_end, L_SEL, N_SEL, RUN)
    held = gl.allocate_shared_memory(q.dtype, [2 * 4, 1, 64, 1, D], k.layout)
    ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 64, 1, D], q.layout)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    overlaps = gl.allocate_shared_memory(gl.bfloat16, [64, 16], NARROW)
    full, empty = barriers_of_ring(STAGES, 4)
    held_full, held_empty = barriers_of_ring(2, 4)
    _store_overlaps(overlaps, PIECES, PIECES_SEL)
    fence_async_shared()
    shared = (held, ring, overlaps, full, empty, held_full, held_empty)
    lse += (b * G + g).to(gl.int64) * R * S
    row = (b * G + g).to(gl.int64) * (t_end - t_begin)
    gl.warp_specialize([
        (_score, (lse, scores, best_of_run, shared, row, t0, t_begin, t_end, S, runs, wanted, scale, R, D, STAGES,
                  L_SEL, RUN, 0)),
        (_score, (lse, scores, best_of_run, shared, row, t0, t_begin, t_end, S, runs, wanted, scale, R, D, STAGES,
                  L_SEL, RUN, 1)),
        (_score, (lse, scores, best_of_run, shared, row, t0, t_begin, t_end, S, runs, wanted, scale, R, D, STAGES,
                  L_SEL, RUN, 2)),
        (_score, (lse, scores, best_of_run, shared, row, t0, t_begin, t_end, S, runs, wanted, scale, R, D, STAGES,
                  L_SEL, RUN, 3)),
        (_copy_queries_and_keys, (q, k, shared, b, g, t0, wanted, R, D, STAGES, RUN * PIECES_SEL, PIECES - 1)),
    ], [4, 4, 4, 1], [112, 112, 112, 24])  # fmt: skip


def write_scores(
    q: Tensor, k: Tensor, lse: Tensor, scores: Tensor, best_of_run: Tensor, t_begin: int, t_end: int, scale: float,
    pieces: int, pieces_selected: int, block: int, slots: int, run: int,
) -> None:  # fmt: skip
    """Write the scores of tokens t_begin…t_end−1; `scale` includes log2(e)."""
    B, S, H, D = q.shape
    G, runs = k.shape[2], scores.shape[3]
    programs = cdiv(t_end - t_begin, 64) * B * G
    score_by_head[(programs, max(1, min(cdiv(runs, 4), PROGRAMS_WANTED // programs)))](
        lse, scores, best_of_run, described_boxes(q, 64, 1), described_boxes(k, 64, 1), B, S, G, runs, t_begin, t_end,
        scale, PIECES=pieces, PIECES_SEL=pieces_selected, L_SEL=block, N_SEL=slots, R=H // G, D=D, STAGES=STAGES,
        RUN=run, num_warps=4, maxnreg=96,
    )  # fmt: skip
