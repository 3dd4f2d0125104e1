"""Gluon: the forward pass of `pairs.py` on Hopper, where `reads_rows` holds.

In Triton's kernel the queries of a tile go through shared memory, and so do its output and the addresses of its rows;
at each of these the warps of a program wait for each other, twelve times in a round. Here a thread reads its queries
into the registers from which they are multiplied, and writes its output from those in which it was summed: no warp
waits for another, except where all multiply. The next tile's queries are read during a tile's softmax.

A matrix product takes and gives two adjacent elements of a row in one thread. Reads and writes need eight. So the
elements of a head get other numbers: queries and keys alike, which leaves their products as they are, and values and
output alike (`_renumbered`). That moves nothing.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tamis.attention.kernels.hopper.softmax import max_of_rows, sum_of_rows
from tamis.attention.kernels.launch import PreparedKernel

REGISTERS = 128  # of a thread: four programs share a multiprocessor


@gluon.constexpr_function
def _layout_of_rows() -> Any:
    """64 rows of 64 elements: eight adjacent ones to a thread, a row to four threads, rows to warps as a product has
    them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]], block_bases=[],
        shape=[64, 64],
    )  # fmt: skip


@gluon.jit
def _renumbered(x):
    """Exchange bits 1 and 2 of an element's number with bits 3 and 4."""
    return x.reshape([64, 2, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])


@gluon.jit
def _locate_item(item, item_list, first_segment, per_sequence, segment, blocks, tokens, table, bounds, G: gl.constexpr):
    """Of an item's list: sequence, first token of the segment, group, the first token of its block and the end of the
    block's sequence or document, and the (segment, group) index in the chunk. As in `items.py`."""
    list_id = gl.load(item_list + item)
    segment_group = list_id // blocks
    index = first_segment + segment_group // G
    first_token = index % per_sequence * segment
    block = list_id % blocks
    if table is not None:
        block += gl.load(table + 4 * first_token + 2)
    begin, end = block * 64, tokens
    if bounds is not None:
        begin, end = gl.load(bounds + 2 * block), gl.load(bounds + 2 * block + 1)
    sequence, group = (index // per_sequence).to(gl.int64), (segment_group % G).to(gl.int64)
    return sequence, first_token, group, begin, end, segment_group


@gluon.jit
def _read_keys(x, begin, end, stride, LAYOUT: gl.constexpr):
    """A block's keys or values, zeros where there are none."""
    key = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(x + (key.to(gl.int64)[:, None] * stride + column[None, :]), mask=(key < end)[:, None], other=0.0)


@gluon.jit
def _pairs_of_tile(pairs, tile, count, R: gl.constexpr, LAYOUT: gl.constexpr):
    """The pair of every row; rows that do not exist have the item's last one."""
    token = gl.minimum(gl.arange(0, 64, layout=LAYOUT) // R, 64 // R - 1)
    return gl.load(pairs + gl.minimum(tile * (64 // R) + token, count - 1))


@gluon.jit
def _rows_of_tile(tile, count, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows of a tile of tokens × heads exist."""
    row = gl.arange(0, 64, layout=LAYOUT)
    return (row < 64 // R * R) & (tile * (64 // R) + row // R < count)


@gluon.jit
def _token_of(pair, N: gl.constexpr, OFFSET: gl.constexpr):
    """The token of a pair, counted from its segment's first. No pair is negative, which makes the division shorter."""
    return (pair.to(gl.uint32) // N).to(OFFSET)


@gluon.jit
def _masked_tiles_of(pairs, count, whole_from, N: gl.constexpr, R: gl.constexpr):
    """How many tiles at the head of an item hold tokens before `whole_from`, which do not see the whole block. They lie
    in it, so there are fewer than it has keys, and tokens are ascending."""
    entry = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    before = gl.load(pairs + entry, mask=entry < count, other=2147483647) // N < whole_from
    return (gl.sum(before.to(gl.int32), 0) + 64 // R - 1) // (64 // R)


@gluon.jit
def _read_queries(
    q, pair, q_s, q_h, R: gl.constexpr, N: gl.constexpr, READ: gl.constexpr, OFFSET: gl.constexpr
):  # fmt: skip
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, READ)) % R
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, READ))
    row = _token_of(gl.convert_layout(pair, gl.SliceLayout(1, READ)), N, OFFSET) * q_s + head * q_h
    return gl.load(q + row[:, None] + column[None, :])


@PreparedKernel
@gluon.jit(do_not_specialize=["first_segment", "per_sequence"])
def attend_items(
    q, k, v, part_out, part_lse, pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks,
    tokens, table, bounds, scale, q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    G: gl.constexpr, R: gl.constexpr, N: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """As `_forward_items` from position 0 on, for blocks of 64 keys; `scale` includes log2(e)."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    READ: gl.constexpr = _layout_of_rows()
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    item = gl.program_id(0)
    count = gl.load(item_count + item)
    if count == 0:
        return
    pairs += gl.load(item_start + item)
    sequence, first_token, group, begin, end, segment_group = _locate_item(
        item, item_list, first_segment, per_sequence, segment, blocks, tokens, table, bounds, G
    )
    k_tile = gl.allocate_shared_memory(q.dtype.element_ty, [64, 64], SWIZZLED)
    v_tile = gl.allocate_shared_memory(q.dtype.element_ty, [64, 64], SWIZZLED)
    k_tile.store(_renumbered(_read_keys(k + sequence * k_b + group * k_g, begin, end, k_s, KEYS)))
    v_tile.store(_renumbered(_read_keys(v + sequence * v_b + group * v_g, begin, end, v_s, KEYS)))
    fence_async_shared()
    gl.thread_barrier()
    q += sequence * q_b + first_token.to(gl.int64) * q_s + group * R * q_h
    part_out += segment_group.to(gl.int64) * segment * (N * R * 64)
    part_lse += segment_group.to(gl.int64) * segment * (N * R)
    masked_tiles = _masked_tiles_of(pairs, count, begin + 63 - first_token, N, R)

    zero = gl.zeros([64, 64], gl.float32, ACC)
    row = gl.arange(0, 64, layout=ROW)
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, READ))
    pair = _pairs_of_tile(pairs, 0, count, R, ROW)
    next_pair = _pairs_of_tile(pairs, 1, count, R, ROW)
    next_q = _read_queries(q, pair, q_s, q_h, R, N, READ, OFFSET)
    for tile in range((count + 64 // R - 1) // (64 // R)):
        q_tile = gl.convert_layout(_renumbered(next_q), LEFT)
        later_pair = _pairs_of_tile(pairs, tile + 2, count, R, ROW)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        next_q = _read_queries(q, next_pair, q_s, q_h, R, N, READ, OFFSET)
        s = warpgroup_mma_wait(0, deps=(s,))
        if tile < masked_tiles:
            last_key = gl.where(begin + key < end, begin + key - first_token, tokens)
            s = gl.where(last_key[None, :] <= (pair // N)[:, None], s, float("-inf"))
        top = max_of_rows(s, ROW) * scale
        top = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s * scale - top[:, None])
        total = sum_of_rows(p, ROW)
        o = warpgroup_mma(gl.convert_layout(p.to(q.dtype.element_ty), LEFT), v_tile, zero, use_acc=False, is_async=True)
        live = _rows_of_tile(tile, count, R, ROW)
        target = pair.to(OFFSET) * R + row % R
        gl.store(part_lse + target, top + libdevice.fast_log2f(total), mask=live)
        o = warpgroup_mma_wait(0, deps=(o,))
        o = (o * (1.0 / gl.where(total == 0.0, 1.0, total))[:, None]).to(q.dtype.element_ty)
        at = (gl.convert_layout(target, gl.SliceLayout(1, READ)) * 64)[:, None] + column[None, :]
        live = gl.convert_layout(live, gl.SliceLayout(1, READ))
        gl.store(part_out + at, gl.convert_layout(_renumbered(o), READ), mask=live[:, None], cache_modifier=".cs")
        pair, next_pair = next_pair, later_pair


def walk_items(items: int, arguments: tuple[Any, ...], sizes: dict[str, Any]) -> None:
    """Launch `attend_items`, with its arguments up to the last stride."""
    taken = {name: sizes[name] for name in ("G", "R", "N", "OFFSET")}
    attend_items[(items,)](*arguments, **taken, num_warps=4, maxnreg=REGISTERS)
