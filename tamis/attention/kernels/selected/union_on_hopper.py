"""Gluon: unions of the selected branch on Hopper, where `copies_blocks` of `union.py` holds.

As in `hopper/boxes.py` one warp of a program does nothing but copy, and every slot of a ring of tiles has two barriers.
Two groups of four warps multiply, 64 rows each. A row is a token with one head of its group, as in `union.py`, which
has the same in Triton for other shapes and GPUs. Every program has one tile of rows: programs that stay and take one
after the other were slower.
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
from tamis.attention.kernels.hopper.boxes import gate_of
from tamis.attention.kernels.hopper.descriptors import described_heads
from tamis.attention.kernels.hopper.softmax import add_to_sums, layout_of_sums, max_of_rows, total_of_sums
from tamis.attention.kernels.launch import PreparedKernel
from tamis.attention.kernels.selected.union import Unions

STAGES = 4


@gluon.jit
def _copy_blocks(
    k, v, union_blocks, count, sequence, group, shared, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _, ring, full, empty = shared
    used = gl.load(count)
    begin = gl.load(union_blocks)
    for step in range(used):
        slot = step % STAGES
        next_begin = gl.load(union_blocks + step + 1)
        mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
        mbarrier.expect(full.index(slot), 2 * 64 * D * 2)
        tma.async_copy_global_to_shared(k, [sequence, begin, group * D], full.index(slot), ring.index(slot * 2))
        tma.async_copy_global_to_shared(v, [sequence, begin, group * D], full.index(slot), ring.index(slot * 2 + 1))
        begin = next_begin


@gluon.jit
def _hold_queries(q_tile, q, q_s, q_h, tokens, R: gl.constexpr, D: gl.constexpr, PART: gl.constexpr):
    """Put half of a tile's queries into shared memory, zeros past the last of `tokens`."""
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, READ))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, READ))[None, :]
    live = (row < 128 // R * R) & (row // R < tokens)
    q_tile.store(gl.load(q + ((row // R * q_s + row % R * q_h)[:, None] + column), mask=live[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _attend(
    q, out, lse, mixture, union_blocks, union_tokens, count, tile, sequence, group, tokens, shared, scale, q_s,
    q_h, G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of half of a tile's rows; the running softmax is that of `union.py`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    held, ring, full, empty = shared
    q_tile = held.index(PART)
    used, whole, next_tokens = gl.load(count), gl.load(count + 1), gl.load(union_tokens)
    _hold_queries(q_tile, q, q_s, q_h, tokens - tile * (128 // R), R, D, PART)
    row = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    in_tile = row // R
    token = tile * (128 // R) + in_tile
    zero = gl.zeros([64, 64], gl.float32, ACC)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    sums = gl.zeros([64, 8], gl.float32, layout_of_sums())
    acc = gl.zeros([64, D], gl.float32, ACC)
    for step in range(used):
        slot = step % STAGES
        chosen = ((next_tokens >> in_tile.to(gl.int64)) & 1) == 1
        next_tokens = gl.load(union_tokens + step + 1)
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        k_tile, v_tile = ring.index(slot * 2).reshape([64, D]), ring.index(slot * 2 + 1).reshape([64, D])
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if step >= whole:
            key = gl.load(union_blocks + step) + gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
            s = gl.where((key < tokens)[None, :] & (key[None, :] <= token[:, None]), s, float("-inf"))
        block_top = max_of_rows(s, gl.SliceLayout(1, ACC)) * scale
        chosen = chosen & (block_top > float("-inf"))
        new_top = gl.where(chosen, gl.maximum(top, block_top), top)
        p = gl.exp2(s * scale - gl.where(chosen, new_top, float("inf"))[:, None])
        decay = gl.exp2(top - gl.where(new_top == float("-inf"), 0.0, new_top))
        sums = add_to_sums(sums, decay, p)
        top = new_top
        weights = gl.convert_layout(p.to(q_tile.dtype), LEFT)
        acc = warpgroup_mma(weights, v_tile, acc * decay[:, None], is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot))
    total = total_of_sums(sums, gl.SliceLayout(1, ACC))
    live = (row < 128 // R * R) & (token < tokens)
    natural = (top + gl.log2(total)) * 0.6931471805599453  # ln 2
    gl.store(lse + (sequence.to(gl.int64) * (G * R) + group * R + row % R) * tokens + token, natural, mask=live)
    acc = acc * (1.0 / gl.where(total == 0.0, 1.0, total))[:, None]
    _store_output(out, mixture, acc.to(out.dtype.element_ty), tile, sequence, group, tokens, G, R, D, PART)


@gluon.jit
def _store_output(
    out, mixture, rows, tile, sequence, group, tokens,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Store half of a tile's rows, and mix them with the other branches as `store_mixture` does."""
    WRITE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sel = gl.convert_layout(rows, WRITE)
    row = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, WRITE))
    token = tile * (128 // R) + row // R
    live = (row < 128 // R * R) & (token < tokens)
    row = (sequence.to(gl.int64) * tokens + token) * (G * R) + group * R + row % R
    at = row[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, WRITE))[None, :]
    gl.store(out + at, sel, mask=live[:, None])
    mixed, gates, cmp, win = mixture
    if mixed is not None:
        acc = gate_of(gates, row, live) * gl.load(cmp + at, mask=live[:, None], other=0.0).to(gl.float32)
        acc += gate_of(gates + 1, row, live) * sel.to(gl.float32)
        acc += gate_of(gates + 2, row, live) * gl.load(win + at, mask=live[:, None], other=0.0).to(gl.float32)
        gl.store(mixed + at, acc.to(out.dtype.element_ty), mask=live[:, None])


@PreparedKernel
@gluon.jit(do_not_specialize=["tiles", "capacity"])
def attend_unions(
    q, union_blocks, union_tokens, counts, out, lse, mixed, gates, cmp, win, k, v, tokens, tiles, capacity, scale, q_b,
    q_s, q_h, G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `_forward_tiles` from position 0 on, for blocks of 64 keys; k and v are descriptors of [B,tokens,G·D]."""
    group = gl.program_id(0) % G
    tile = tiles - 1 - gl.program_id(0) // G % tiles  # the last tokens see the most keys: longest first
    sequence = gl.program_id(0) // G // tiles
    index = (sequence * G + group).to(gl.int64) * tiles + tile
    count = counts + index * 2
    union_blocks += index * capacity
    union_tokens += index * capacity
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    held = gl.allocate_shared_memory(q.dtype.element_ty, [2, 64, D], SWIZZLED)
    ring = gl.allocate_shared_memory(k.dtype, [STAGES * 2, 1, 64, D], k.layout)
    full, empty = barriers_of_ring(STAGES, 2)
    fence_async_shared()
    q += sequence.to(gl.int64) * q_b + (tile * (128 // R)).to(gl.int64) * q_s + group * R * q_h
    shared = (held, ring, full, empty)
    mixture = (mixed, gates, cmp, win)
    gl.warp_specialize([
        (_attend, (q, out, lse, mixture, union_blocks, union_tokens, count, tile, sequence, group, tokens, shared,
                   scale, q_s, q_h, G, R, D, STAGES, 0)),
        (_attend, (q, out, lse, mixture, union_blocks, union_tokens, count, tile, sequence, group, tokens, shared,
                   scale, q_s, q_h, G, R, D, STAGES, 1)),
        (_copy_blocks, (k, v, union_blocks, count, sequence, group, shared, D, STAGES)),
    ], [4, 1], [104, 24])  # fmt: skip


def attend_on_hopper(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, unions: Unions, out_BSHD: Tensor, lse_BHS: Tensor,
    mixture: tuple[Tensor | None, ...], scale: float,
) -> None:  # fmt: skip
    """Write output and log-sum-exp over the unions, and the mixture; `scale` includes log2(e)."""
    batch, tokens, heads, dim = q_BSHD.shape
    groups, (tiles, capacity) = k_BSGD.shape[2], unions.blocks.shape[2:]
    attend_unions[(tiles * batch * groups,)](
        q_BSHD, unions.blocks, unions.tokens, unions.counts, out_BSHD, lse_BHS, *mixture, described_heads(k_BSGD),
        described_heads(v_BSGD), tokens, tiles, capacity, scale, *q_BSHD.stride()[:3],
        G=groups, R=heads // groups, D=dim, STAGES=STAGES, num_warps=4, maxnreg=80,
    )  # fmt: skip
