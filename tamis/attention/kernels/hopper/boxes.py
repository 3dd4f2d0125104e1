"""Gluon: attention of tiles of queries on Hopper, over a run of keys or over the blocks of a list.

A run is what a token sees in a dense branch, a list is a union of the selected branch. `takes_boxes` tells which calls
come here.

One warp of a program does nothing but copy tiles into shared memory, by the tensor memory accelerator. Three groups of
four warps multiply, with a box of 64 rows each. Every slot of a ring has two barriers: one is passed when the slot is
full, the other when it is empty. So copies never wait for products, and no register holds an address.

A group of warps begins the scores of a tile of keys together with the sum over the tile before, and waits for both. So
a slot has a tile of keys, and the values of the tile before. The groups begin their products in turn: while one
multiplies, the others compute exponentials. Programs stay on a multiprocessor and take one tile of rows after the
other.

A box has 64 rows, tokens of HEADS heads: the largest power of two that divides the heads of a group. If a group has
three boxes of heads, or a multiple of three, the boxes of a program are of the same tokens (SIDE_BY_SIDE), else of
tokens that follow each other.

`banded/queries.py` and `selected/union.py` have the same in Triton for other shapes and GPUs. They define which keys a
token sees, and what a list has.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

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

from tamis.attention.kernels.gates import NOT_MIXED
from tamis.attention.kernels.hopper.barriers import barriers_of_ring
from tamis.attention.kernels.hopper.descriptors import described_boxes
from tamis.attention.kernels.hopper.softmax import add_to_sums, layout_of_sums, max_of_rows, total_of_sums
from tamis.attention.kernels.launch import PreparedKernel, cdiv, multiprocessors

STAGES = {64: 4, 128: 3}  # by head dim; three are all that fit at 128


class Boxes(NamedTuple):
    """How rows are cut into tiles, by the heads of a group."""

    heads: int  # of a box
    side_by_side: bool  # three boxes of the same tokens
    tokens: int  # of a tile
    shares: int  # tiles that have the same tokens, of other heads of the group

    @classmethod
    def of(cls, heads_per_group: int) -> Boxes:
        heads = min(64, heads_per_group & -heads_per_group)
        side_by_side = heads_per_group // heads % 3 == 0
        tokens, shares = 64 // heads, heads_per_group // heads
        return cls(heads, True, tokens, shares // 3) if side_by_side else cls(heads, False, tokens * 3, shares)


@gluon.jit
def seen_by_token(table, token, L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr):
    """First key that a token sees, and the one after the last."""
    first_token, first_key = token * 0, token * 0
    if table is not None:
        first_token = gl.load(table + 4 * token)
    if W > 0:
        return gl.maximum(token - (W - 1), first_token), token + 1
    if table is not None:
        first_key = gl.load(table + 4 * token + 3)
    return first_key, first_key + gl.maximum((token - first_token + (1 - L + STRIDE)) // STRIDE, 0)


@gluon.jit
def _place(work, S, G, R: gl.constexpr, HEADS: gl.constexpr, SIDE_BY_SIDE: gl.constexpr):
    """Sequence, group, tile of tokens, its first token, and first head; heads are adjacent, then groups, then tiles.

    The last tokens see the most keys: longest first.
    """
    TOKENS: gl.constexpr = 64 // HEADS if SIDE_BY_SIDE else 3 * (64 // HEADS)
    SHARES: gl.constexpr = R // HEADS // 3 if SIDE_BY_SIDE else R // HEADS
    tiles = (S + TOKENS - 1) // TOKENS
    share = work % SHARES
    rest = work // SHARES
    g = rest % G
    rest = rest // G
    tile = tiles - 1 - rest % tiles
    index = ((rest // tiles) * G + g).to(gl.int64) * tiles + tile
    return rest // tiles, g, index, tile * TOKENS, g * R + share * (HEADS * 3 if SIDE_BY_SIDE else HEADS)


@gluon.jit
def _tiles_of_keys(
    walk, index, t0, S, L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """First key of a run, and how many tiles of 64 keys there are."""
    table, blocks, _tokens, counts, _capacity = walk
    if blocks is not None:
        return t0 * 0, gl.load(counts + index * 2)
    begin, _ = seen_by_token(table, t0, L, STRIDE, W)
    _, end = seen_by_token(table, gl.minimum(t0 + TOKENS - 1, S - 1), L, STRIDE, W)
    return begin, gl.maximum(end - begin + 63, 0) // 64


@gluon.jit
def _first_key(walk, index, begin, tile):
    """Of a tile of keys."""
    _table, blocks, _tokens, _counts, capacity = walk
    first = begin + tile * 64
    if blocks is not None:
        first = gl.load(blocks + index * capacity + tile)
    return first


@gluon.jit
def _copy_queries_and_keys(
    q, k, v, walk, shared, works, S, G,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, SIDE_BY_SIDE: gl.constexpr,
):  # fmt: skip
    held, ring, full, empty, held_full, held_empty, _turns = shared
    OF_BOX: gl.constexpr = 64 // HEADS
    TOKENS: gl.constexpr = OF_BOX if SIDE_BY_SIDE else 3 * OF_BOX
    copied = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        b, g, index, t0, head = _place(work, S, G, R, HEADS, SIDE_BY_SIDE)
        begin, tiles = _tiles_of_keys(walk, index, t0, S, L, STRIDE, W, TOKENS)
        buffer = taken % 2
        bar = held_full.index(buffer)
        mbarrier.wait(held_empty.index(buffer), (taken // 2 + 1) & 1)
        mbarrier.expect(bar, 3 * 64 * D * 2)
        for box in gl.static_range(3):
            into = held.index(buffer * 3 + box)
            if SIDE_BY_SIDE:
                tma.async_copy_global_to_shared(q, [b, t0, head + box * HEADS, 0], bar, into)
            else:
                tma.async_copy_global_to_shared(q, [b, t0 + box * OF_BOX, head, 0], bar, into)
        before = t0 * 0
        first = _first_key(walk, index, begin, 0)
        for tile in range(gl.where(tiles > 0, tiles + 1, 0)):
            following = _first_key(walk, index, begin, tile + 1)
            slot = copied % STAGES
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), (copied // STAGES + 1) & 1)
            mbarrier.expect(bar, 2 * 64 * D * 2, pred=(tile > 0) & (tile < tiles))
            mbarrier.expect(bar, 64 * D * 2, pred=(tile == 0) | (tile == tiles))
            tma.async_copy_global_to_shared(k, [b, first, g, 0], bar, ring.index(slot * 2), pred=tile < tiles)
            tma.async_copy_global_to_shared(v, [b, before, g, 0], bar, ring.index(slot * 2 + 1), pred=tile > 0)
            before = first
            first = following
            copied += 1
        taken += 1


@gluon.jit
def _limits(
    walk, index, t0, S, L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, HEADS: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """What `_weigh` needs to know of a box: for a run of keys those that each row sees, and those that all rows see.

    For a list the first token, how many there are in the sequence, and how many blocks all rows see whole.
    """
    table, blocks, _tokens, counts, _capacity = walk
    if blocks is not None:
        return t0, S, gl.load(counts + index * 2 + 1)
    else:
        token = t0 + gl.arange(0, 64, layout=ROW) // HEADS
        seen_begin, seen_end = seen_by_token(table, gl.minimum(token, S - 1), L, STRIDE, W)
        whole_begin, _ = seen_by_token(table, gl.minimum(t0 + 64 // HEADS - 1, S - 1), L, STRIDE, W)
        _, whole_end = seen_by_token(table, gl.minimum(t0, S - 1), L, STRIDE, W)
        return seen_begin, seen_end, whole_begin, whole_end


@gluon.jit
def _tokens_of_block(walk, index, tile):
    """Which of the tokens chose a block, one bit each."""
    _table, blocks, tokens, _counts, capacity = walk
    bits = index
    if blocks is not None:
        bits = gl.load(tokens + index * capacity + tile)
    return bits


@gluon.jit
def _weigh(
    s, walk, index, begin, tile, bits, limits, m, sums, scale,
    HEADS: gl.constexpr, OFFSET: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Running softmax: weights of 64 keys, the new maximum, what all sums before shrink by, and the sums."""
    _table, blocks, _tokens, _counts, _capacity = walk
    if blocks is not None:
        t0, S, whole = limits
        in_box = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)) // HEADS
        if tile >= whole:
            key = _first_key(walk, index, begin, tile) + gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
            s = gl.where((key < S)[None, :] & (key[None, :] <= (t0 + in_box)[:, None]), s, float("-inf"))
        top = max_of_rows(s, gl.SliceLayout(1, ACC)) * scale
        chosen = (((bits >> (OFFSET + in_box).to(gl.int64)) & 1) == 1) & (top > float("-inf"))
        m_new = gl.where(chosen, gl.maximum(m, top), m)
        p = gl.exp2(s * scale - gl.where(chosen, m_new, float("inf"))[:, None])  # 0 in rows that chose another block
        shrink = gl.exp2(m - gl.where(m_new == float("-inf"), 0.0, m_new))
    else:
        seen_begin, seen_end, whole_begin, whole_end = limits
        first = begin + tile * 64
        if (first < whole_begin) | (first + 64 > whole_end):
            key = (first + gl.arange(0, 64, layout=gl.SliceLayout(0, ACC)))[None, :]
            s = gl.where((key >= seen_begin[:, None]) & (key < seen_end[:, None]), s, float("-inf"))
        m_new = gl.maximum(m, max_of_rows(s, gl.SliceLayout(1, ACC)) * scale)
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * scale - m_safe[:, None])
        shrink = gl.exp2(m - m_safe)
    return p, m_new, shrink, add_to_sums(sums, shrink, p)


@gluon.jit
def _attend(
    lse, out, mixture, scale, walk, shared, works, S, G,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, SIDE_BY_SIDE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one of the boxes."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUM, k_width=2)
    TOKENS: gl.constexpr = 64 // HEADS if SIDE_BY_SIDE else 3 * (64 // HEADS)
    OFFSET: gl.constexpr = 0 if SIDE_BY_SIDE else BOX * (64 // HEADS)  # of the box's tokens from the tile's
    held, ring, full, empty, held_full, held_empty, turns = shared
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    zero = gl.zeros([64, 64], gl.float32, ACC)
    walked = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        b, _g, index, t0, head = _place(work, S, G, R, HEADS, SIDE_BY_SIDE)
        begin, tiles = _tiles_of_keys(walk, index, t0, S, L, STRIDE, W, TOKENS)
        t0 += OFFSET
        head += BOX * HEADS if SIDE_BY_SIDE else 0
        limits = _limits(walk, index, t0, S, L, STRIDE, W, HEADS, gl.SliceLayout(1, ACC))
        bits = _tokens_of_block(walk, index, 0)
        buffer = taken % 2
        mbarrier.wait(held_full.index(buffer), (taken // 2) & 1)
        mine = held.index(buffer * 3 + BOX)
        q_tile = mine.reshape([64, D])
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
        sums = gl.zeros([64, 8], gl.float32, layout_of_sums())
        acc = gl.zeros([64, D], gl.float32, SUM)
        if tiles > 0:
            slot = walked % STAGES
            mbarrier.wait(full.index(slot), (walked // STAGES) & 1)
            k_tile = ring.index(slot * 2).reshape([64, D])
            s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(empty.index(slot))
            walked += 1
            p, m, shrink, sums = _weigh(
                s, walk, index, begin, 0, bits, limits, m, sums, scale, HEADS, OFFSET, ACC
            )  # fmt: skip
            weights = gl.convert_layout(p.to(q_tile.dtype), LEFT)
            for tile in range(1, tiles):
                bits = _tokens_of_block(walk, index, tile)
                slot = walked % STAGES
                k_tile, v_tile = ring.index(slot * 2).reshape([64, D]), ring.index(slot * 2 + 1).reshape([64, D])
                mbarrier.wait(turns.index(BOX), (turn + (1 if BOX == 0 else 0)) & 1)
                mbarrier.wait(full.index(slot), (walked // STAGES) & 1)
                s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                acc = warpgroup_mma(weights, v_tile, acc, is_async=True)
                mbarrier.arrive(turns.index((BOX + 1) % 3))
                s, acc = warpgroup_mma_wait(0, deps=(s, acc))
                mbarrier.arrive(empty.index(slot))
                walked += 1
                turn += 1
                p, m, shrink, sums = _weigh(
                    s, walk, index, begin, tile, bits, limits, m, sums, scale, HEADS, OFFSET, ACC
                )  # fmt: skip
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
                weights = gl.convert_layout(p.to(q_tile.dtype), LEFT)
            slot = walked % STAGES
            mbarrier.wait(full.index(slot), (walked // STAGES) & 1)
            acc = warpgroup_mma(weights, ring.index(slot * 2 + 1).reshape([64, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(slot))
            walked += 1
        total = total_of_sums(sums, gl.SliceLayout(1, ACC))
        natural = (m + gl.log2(total)) * 0.6931471805599453  # ln 2; −inf for a row that sees no key
        token = t0 + row // HEADS
        gl.store(lse + (b * G * R + head + row % HEADS).to(gl.int64) * S + token, natural, mask=token < S)
        share = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, SUM))
        q_tile.store((acc * share[:, None]).to(q_tile.dtype))  # the queries are not needed any more
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [b, t0, head, 0], mine)
        _mix(mixture, q_tile, b, t0, head, S, G * R, HEADS, D)
        tma.store_wait(0)
        mbarrier.arrive(held_empty.index(buffer))
        taken += 1


@gluon.jit
def _mix(mixture, tile, b, t0, head, S, H, HEADS: gl.constexpr, D: gl.constexpr):
    """Mix the window's rows with those of the other branches, as `store_mixture` does."""
    WRITE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    mixed, gates, cmp, sel = mixture
    if mixed is not None:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, WRITE))
        live = t0 + row // HEADS < S
        row = (b.to(gl.int64) * S + t0 + row // HEADS) * H + head + row % HEADS
        at = row[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, WRITE))[None, :]
        acc = gate_of(gates, row, live) * gl.load(cmp + at, mask=live[:, None], other=0.0).to(gl.float32)
        acc += gate_of(gates + 1, row, live) * gl.load(sel + at, mask=live[:, None], other=0.0).to(gl.float32)
        acc += gate_of(gates + 2, row, live) * tile.load(WRITE).to(gl.float32)
        gl.store(mixed + at, acc.to(tile.dtype), mask=live[:, None])


@gluon.jit
def gate_of(gates, row, live):
    """The gate of one branch for every row."""
    return gl.load(gates + row * 3, mask=live, other=0.0).to(gl.float32)[:, None]


@PreparedKernel
@gluon.jit(do_not_specialize=["works", "S", "G", "capacity"])
def attend_in_boxes(
    lse, table, blocks, tokens, counts, mixed, gates, cmp, sel, out, q, k, v, works, S, G, capacity, scale,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, SIDE_BY_SIDE: gl.constexpr,
):  # fmt: skip
    """q and out are descriptors of boxes, k and v of 64 keys. Programs share `works` tiles of three boxes."""
    held = gl.allocate_shared_memory(q.dtype, [2 * 3, 1, 64 // HEADS, HEADS, D], q.layout)
    ring = gl.allocate_shared_memory(q.dtype, [STAGES * 2, 1, 64, 1, D], k.layout)
    full, empty = barriers_of_ring(STAGES, 3)
    held_full, held_empty = barriers_of_ring(2, 3)
    turns = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    shared = (held, ring, full, empty, held_full, held_empty, turns)
    walk = (table, blocks, tokens, counts, capacity)
    mixture = (mixed, gates, cmp, sel)
    gl.warp_specialize([
        (_attend, (lse, out, mixture, scale, walk, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS,
                   SIDE_BY_SIDE, 0)),
        (_attend, (lse, out, mixture, scale, walk, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS,
                   SIDE_BY_SIDE, 1)),
        (_attend, (lse, out, mixture, scale, walk, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS,
                   SIDE_BY_SIDE, 2)),
        (_copy_queries_and_keys, (q, k, v, walk, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS,
                                  SIDE_BY_SIDE)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def attend_run(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, table: Tensor | None,
    length: int, stride: int, window: int, mixture: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Write output and log-sum-exp over the keys that a `Band` lets each token see; `scale` includes log2(e).

    Then the window's rows are mixed, if `mixture` has the mixed output, the gates and the outputs of the others.
    """
    _launch(q, k, v, out, lse, scale, (table, None, None, None), mixture, 0, length, stride, window)


def attend_list(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, blocks: Tensor, tokens: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Write output and log-sum-exp over lists of blocks as `Unions` has them."""
    _launch(q, k, v, out, lse, scale, (None, blocks, tokens, counts), NOT_MIXED, blocks.shape[3], 1, 1, 0)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, walk: tuple[Tensor | None, ...],
    mixture: tuple[Tensor | None, ...], capacity: int, length: int, stride: int, window: int,
) -> None:  # fmt: skip
    B, S, H, D = q.shape
    G = k.shape[2]
    boxes = Boxes.of(H // G)
    works = B * cdiv(S, boxes.tokens) * G * boxes.shares
    attend_in_boxes[(min(works, multiprocessors(q.device)),)](
        lse, *walk, *mixture, *(described_boxes(x, 64 // boxes.heads, boxes.heads) for x in (out, q)),
        *(described_boxes(x, 64, 1) for x in (k, v)), works, S, G, capacity, scale,
        L=length, STRIDE=stride, W=window, R=H // G, D=D, STAGES=STAGES[D], HEADS=boxes.heads,
        SIDE_BY_SIDE=boxes.side_by_side, num_warps=4, maxnreg=128,
    )  # fmt: skip
