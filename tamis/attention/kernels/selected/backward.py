"""Triton: gradients of selected attention, block by block. One sweep over the pairs gives dk, dv and parts of dq.

A program holds dK and dV of a block in registers while it walks the tokens that chose the block. Each pair leaves one
partial query gradient, which `banded/query_gradients.py` adds up in slot order, with what the dense branches add. There
are no float atomics: sums have a fixed order. Two kernels compute the same: `backward_items` for every shape, and
`backward_halves`, which holds a head's elements in two halves, so that at head dim 128 two programs share a
multiprocessor.

The first n_sel·l_sel tokens of a sequence, its *prefix*, choose every block up to their own: each sees one run of keys.
Where `takes_prefix` holds, they are in no list, and the kernels of the dense branches give their gradients.

Shapes: B batch, S tokens, H query heads, G groups, R = H/G heads per group, D head dim, N slots (n_sel), BN keys held
at once, SUB such tiles per block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.checks import check_gradients, check_like
from tamis.attention.kernels.banded.keys import copies_rows_of_heads, key_gradients
from tamis.attention.kernels.banded.queries import Band, Rows
from tamis.attention.kernels.banded.query_gradients import SelectedParts, write_query_gradient
from tamis.attention.kernels.banded.statistics import gather_statistics
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedKernel,
    fills_the_gpu,
    launch_settings,
    softmax_scale,
    takes_halves,
    unit_last_stride,
)
from tamis.attention.kernels.selected.items import (
    add_key_gradients,
    block_tokens,
    keys_of_block,
    locate_item,
    masked_tiles_of,
    pairs_of_tile,
)  # fmt: skip
from tamis.attention.kernels.selected.layout import (
    ITEM,
    LARGE,
    Layout,
    cached_segment,
    chunks_of,
    sizes_of,
    stays_whole,
)
from tamis.attention.kernels.selected.lists import chunks_of_pairs, item_arguments
from tamis.attention.kernels.selected.merges import merge_key_gradients
from tamis.attention.kernels.selected.pairs import check_selected
from tamis.attention.kernels.selected.union import load_at, store_at
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import PackedTables
from tamis.attention.spec import NSASpec

CHUNKS_OF_CUT = 5  # of a large call with a sequence that must be cut, which takes sums in float32 and more lists
# Tokens of an item of `backward_items`: long ones load their block and write its sums less often. Where a chunk would
# have few of them, shorter ones keep all processors busy to the end.
LONGEST_ITEM = 1024
ITEMS_WANTED = 800
# Prefixes take the dense branches' kernels in sequences up to so many times as long; measured.
SHORT_BY_PREFIX = 8
LEAST_PREFIX = 128  # tokens: no tile of query gradients has more


def selected_backward(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    ids_BSGn: Tensor,
    lse_BHS: Tensor,
    dout_BSHD: Tensor,
    gates_BSH: Tensor,
    delta_BHS: Tensor,
    dq_BSHD: Tensor,
    spec: NSASpec,
    trusted: bool = False,
    chunk: int | None = None,
    halves: bool | None = None,
    segment: int | None = None,
    packed: PackedTables | None = None,
    scale: float | None = None,
    dense: Sequence[tuple[Band, Rows]] = (),
    prefix: tuple[Band, Rows] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v, and write that of q to `dq`; `dout` is the gradient of the mixed output.

    `gates` are this branch's alone. What the `dense` branches add to the gradient of q is written with it. `halves`
    forces one of the two kernels, or the other; `segment` sets a segment's tokens, for the halves alone: only there
    no item adds its gradients itself, which two segments of a sequence must not do at once.

    The tokens of a `prefix` must have chosen every block up to their own.
    """
    if not trusted:
        check_selected(q_BSHD, k_BSGD, v_BSGD, ids_BSGn, spec)
        check_gradients(q_BSHD, dout_BSHD, dq_BSHD, lse=lse_BHS, delta=delta_BHS)
        check_like("q", q_BSHD, gates=(gates_BSH, tuple(q_BSHD.shape[:3])))
    q_BSHD, k_BSGD, v_BSGD, ids_BSGn, dout_BSHD = map(unit_last_stride, (q_BSHD, k_BSGD, v_BSGD, ids_BSGn, dout_BSHD))
    batch, tokens, heads, dim = q_BSHD.shape
    groups = ids_BSGn.shape[2]
    heads_per_group = heads // groups
    scale = softmax_scale(q_BSHD, scale)
    prefix_tokens, keys_written = 0, None
    if prefix is None:
        dk, dv = (empty((batch, tokens, groups, dim), k_BSGD.dtype, q_BSHD.device) for _ in range(2))
    else:
        dk, dv = key_gradients(q_BSHD, *prefix, dout_BSHD)
        prefix_tokens = prefix[0].window
        keys_written = tokens if packed else prefix_tokens
        if (packed.longest if packed else tokens) <= prefix_tokens:  # nothing is left for lists
            write_query_gradient(q_BSHD, dout_BSHD, dq_BSHD, scale, dense, None, prefix)
            return dk, dv
    halves = takes_halves(q_BSHD, heads_per_group) if halves is None else halves
    assert halves or segment is None
    if halves and stays_whole(q_BSHD, packed) and segment is None and packed is None:
        segment = cached_segment(q_BSHD, heads_per_group, spec)
    chunks = chunks_of(q_BSHD, spec, packed, CHUNKS_OF_CUT)
    item = ITEM if halves else item_of_sweep(ids_BSGn, chunks)
    layout = Layout.of(ids_BSGn, spec, chunks, chunk, segment=segment, packed=packed, item=item)
    sizes = sizes_of(q_BSHD, layout, spec)
    parts = sizes["SUB"]
    settings = launch_settings("halves" if halves else "backward", q_BSHD, sizes["R"])
    device = q_BSHD.device
    # A sequence of several chunks adds up its gradients in float32 and rounds with the last of them. What a prefix adds
    # was rounded before.
    several = layout.segments_per_chunk < layout.segments_per_sequence
    dk_sum, dv_sum = (empty(dk.shape, torch.float32, device) if several else x for x in (dk, dv))
    part_dq = empty((layout.pairs_per_chunk * parts * sizes["R"], dim), q_BSHD.dtype, device)
    kept = layout.items_per_chunk if halves else layout.parts_per_chunk
    part_dkv = empty((2, kept, parts, sizes["BN"], dim), torch.float32, device)
    inputs = q_BSHD, k_BSGD, v_BSGD, dout_BSHD, gather_statistics(lse_BHS, delta_BHS, gates_BSH), lse_BHS.numel()
    strides = [stride for x in (q_BSHD, k_BSGD, v_BSGD, dout_BSHD) for stride in x.stride()[:3]]
    parts_of_sums = part_dq, part_dkv[0], part_dkv[1]
    for lists in chunks_of_pairs(ids_BSGn, layout, packed=packed, every_part=halves, prefix=prefix_tokens):
        grid, work = (layout.items_per_chunk, parts), item_arguments(lists, layout, packed)
        if halves:
            backward_halves[grid](*inputs, *parts_of_sums, *work, scale * LOG2E, *strides, **sizes, **settings)
        else:
            backward_items[grid](
                *inputs, *parts_of_sums, dk_sum, dv_sum, dk, dv, keys_written, lists.list_items, lists.item_part, *work,
                scale * LOG2E, scale, *strides, **sizes, **settings,
            )  # fmt: skip
        left = SelectedParts(part_dq, ids_BSGn, parts, *layout.chunk_from(lists.first_segment))
        write_query_gradient(q_BSHD, dout_BSHD, dq_BSHD, scale, dense, left, prefix)
        merge_key_gradients[(layout.sequences_per_chunk * groups * layout.blocks, parts * sizes["BN"] // 16)](
            part_dkv[0], part_dkv[1], lists.list_first, lists.list_items, *work[-2:], dk_sum, dv_sum, dk, dv,
            keys_written, lists.first_segment, layout.segments_per_chunk, layout.segments_per_sequence, layout.segments,
            layout.segment, layout.blocks, packed.blocks if packed else layout.blocks, tokens, scale,
            G=sizes["G"], SUB=parts, L_SEL=spec.l_sel, BN=sizes["BN"], D=dim, BD=sizes["BD"], KEYS=16, ALL=halves,
        )  # fmt: skip
    return dk, dv


def takes_prefix(q_BSHD: Tensor, dout_BSHD: Tensor, rows: Rows, spec: NSASpec, packed: PackedTables | None) -> bool:
    """Whether the dense branches' kernels have the prefix of a sequence or document, and are faster than lists.

    They are in large calls of short sequences, of which the prefix is a large part.
    """
    prefix, longest = spec.n_sel * spec.l_sel, packed.longest if packed else q_BSHD.shape[1]
    is_short = prefix >= LEAST_PREFIX and longest <= SHORT_BY_PREFIX * prefix
    return is_short and fills_the_gpu(q_BSHD) and copies_rows_of_heads(q_BSHD, dout_BSHD, rows)


def item_of_sweep(ids_BSGn: Tensor, chunks: int) -> int:
    """Tokens of an item of `backward_items`, in a call that is cut into so many chunks if it is large."""
    batch, tokens, groups, slots = ids_BSGn.shape
    pairs = min(batch * tokens, max(LARGE, batch * tokens) // chunks) * groups * slots
    item = LONGEST_ITEM
    while item > ITEM and pairs < ITEMS_WANTED * item:
        item //= 2
    return item


@triton.jit
def _first_rows(
    q, dout, statistics, part_dq, sequence, first_token, group, segment_group, segment, sub, tokens,
    q_b, q_s, q_h, o_b, o_s, o_h, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Where the rows of an item's segment and group begin."""
    first_token64 = first_token.to(tl.int64)
    q += sequence * q_b + first_token64 * q_s + group * R * q_h
    dout += sequence * o_b + first_token64 * o_s + group * R * o_h
    statistics += (sequence * tokens + first_token64) * (G * R) + group * R
    part_dq += (segment_group.to(tl.int64) * segment * N * SUB + sub) * R * D
    return q, dout, statistics, part_dq


@triton.jit
def _row_statistics(statistics, rows, in_segment, head, live, G: tl.constexpr, R: tl.constexpr):
    """Log-sum-exp, delta and gate of a tile's rows."""
    row_statistics = statistics + in_segment * (G * R) + head
    row_lse = tl.load(row_statistics, mask=live, other=float("inf"))  # p = 0: missing rows add nothing
    row_delta = tl.load(row_statistics + rows, mask=live, other=0.0)
    row_gate = tl.load(row_statistics + 2 * rows, mask=live, other=0.0)
    return row_lse, row_delta, row_gate


@triton.jit
def _without_later_keys(p, token, begin, sub, L_SEL: tl.constexpr, BN: tl.constexpr):
    """Nothing of the keys that lie behind a row's token, or behind the block."""
    ahead = token - begin - sub * BN
    column = tl.arange(0, BN)
    visible = column[None, :] <= ahead[:, None]
    if L_SEL % BN != 0:
        visible = visible & (column < L_SEL - sub * BN)[None, :]
    return tl.where(visible, p, 0.0)


@PreparedKernel
@triton.jit(do_not_specialize=["first_segment", "per_sequence"])
def backward_items(
    q, k, v, dout, statistics, rows, part_dq, part_dk, part_dv, dk_sum, dv_sum, dk_out, dv_out, keys_written,
    list_items, item_part, pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks,
    tokens, table, bounds, scale, dk_scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, o_b, o_s, o_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One item: all five products of the backward pass for one block's keys and the item's tokens."""
    item = tl.program_id(0)
    sub = tl.program_id(1)
    count = tl.load(item_count + item)
    if count == 0:
        return
    start, list_id, sequence, first_token, group, block, segment_group = locate_item(
        item, item_list, item_start, first_segment, per_sequence, segment, blocks, table, G
    )
    in_block, key, key_live = keys_of_block(bounds, block, sub, tokens, L_SEL, BN)
    begin, _ = block_tokens(bounds, block, tokens, L_SEL)
    key64 = key.to(tl.int64)
    k_tile = load_at(k + sequence * k_b + group * k_g, key64 * k_s, key_live, D, BD)
    v_tile = load_at(v + sequence * v_b + group * v_g, key64 * v_s, key_live, D, BD)

    head = tl.arange(0, ROWS) % R
    q, dout, statistics, part_dq = _first_rows(
        q, dout, statistics, part_dq, sequence, first_token, group, segment_group, segment, sub, tokens,
        q_b, q_s, q_h, o_b, o_s, o_h, G, R, N, SUB, D,
    )  # fmt: skip
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    masked_tiles = masked_tiles_of(pairs, start, count, begin + L_SEL - first_token, N, ROWS // R, L_SEL, BN)
    next_pair = pairs_of_tile(pairs, 0, start, count, -1, R, ROWS)
    for tile in range(tl.cdiv(count, ROWS // R)):
        pair = tl.maximum(next_pair, 0)
        live = next_pair >= 0
        next_pair = pairs_of_tile(pairs, tile + 1, start, count, -1, R, ROWS)
        in_segment = (pair // N).to(OFFSET)
        token = first_token + pair // N
        q_tile = load_at(q, in_segment * q_s + head * q_h, live, D, BD)
        do_tile = load_at(dout, in_segment * o_s + head * o_h, live, D, BD)
        row_lse, row_delta, row_gate = _row_statistics(statistics, rows, in_segment, head, live, G, R)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)  # under way while p is computed
        p = tl.exp2(s * scale - row_lse[:, None])
        if tile < masked_tiles:
            p = _without_later_keys(p, token, begin, sub, L_SEL, BN)
        weighted = (p * row_gate[:, None]).to(do_tile.dtype)
        dv = tl.dot(tl.trans(weighted), do_tile, dv, input_precision=PRECISION)
        ds = (p * (dp * row_gate[:, None] - row_delta[:, None])).to(q_tile.dtype)
        dk = tl.dot(tl.trans(ds), q_tile, dk, input_precision=PRECISION)
        dq = tl.dot(ds, k_tile, input_precision=PRECISION)
        row = pair.to(OFFSET) * (SUB * R) + head
        store_at(part_dq, row * D, dq, live, D, BD)
    if tl.load(list_items + list_id) == 1:
        # Located again, because registers that hold these numbers during the loop would spill others.
        _, _, sequence, first_token, group, block, _ = locate_item(
            item, item_list, item_start, first_segment, per_sequence, segment, blocks, table, G
        )
        begin, end = block_tokens(bounds, block, tokens, L_SEL)
        add_key_gradients(
            dk, dv, in_block, begin, end, group, sequence, begin < first_token, end <= first_token + segment, dk_sum,
            dv_sum, dk_out, dv_out, keys_written, tokens, dk_scale, G, L_SEL, D, BD,
        )  # fmt: skip
    else:
        row = (tl.load(item_part + item).to(tl.int64) * SUB + sub) * BN + tl.arange(0, BN)
        every_key = tl.full((BN,), True, tl.int1)
        store_at(part_dk, row * D, dk, every_key, D, BD)
        store_at(part_dv, row * D, dv, every_key, D, BD)


@PreparedKernel
@triton.jit(do_not_specialize=["first_segment", "per_sequence"])
def backward_halves(
    q, k, v, dout, statistics, rows, part_dq, part_dk, part_dv,
    pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks, tokens, table, bounds,
    scale, q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, o_b, o_s, o_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The same, with the first and the last half of a head's elements apart; D is a power of two.

    Gradients of keys and values are summed transposed, so that p and ds reach shared memory as they are. Every item
    writes them as partial sums: adding here would take registers that the loop needs.
    """
    item = tl.program_id(0)
    sub = tl.program_id(1)
    count = tl.load(item_count + item)
    if count == 0:
        return
    start, _, sequence, first_token, group, block, segment_group = locate_item(
        item, item_list, item_start, first_segment, per_sequence, segment, blocks, table, G
    )
    _, key, key_live = keys_of_block(bounds, block, sub, tokens, L_SEL, BN)
    begin, _ = block_tokens(bounds, block, tokens, L_SEL)
    key64 = key.to(tl.int64)
    HALF: tl.constexpr = D // 2
    k_lo = load_at(k + sequence * k_b + group * k_g, key64 * k_s, key_live, HALF, HALF)
    k_hi = load_at(k + sequence * k_b + group * k_g + HALF, key64 * k_s, key_live, HALF, HALF)
    v_lo = load_at(v + sequence * v_b + group * v_g, key64 * v_s, key_live, HALF, HALF)
    v_hi = load_at(v + sequence * v_b + group * v_g + HALF, key64 * v_s, key_live, HALF, HALF)

    head = tl.arange(0, ROWS) % R
    q, dout, statistics, part_dq = _first_rows(
        q, dout, statistics, part_dq, sequence, first_token, group, segment_group, segment, sub, tokens,
        q_b, q_s, q_h, o_b, o_s, o_h, G, R, N, SUB, D,
    )  # fmt: skip
    dk_lo = tl.zeros((HALF, BN), tl.float32)
    dk_hi = tl.zeros((HALF, BN), tl.float32)
    dv_lo = tl.zeros((HALF, BN), tl.float32)
    dv_hi = tl.zeros((HALF, BN), tl.float32)
    masked_tiles = masked_tiles_of(pairs, start, count, begin + L_SEL - first_token, N, ROWS // R, L_SEL, BN)
    next_pair = pairs_of_tile(pairs, 0, start, count, -1, R, ROWS)
    tiles = tl.cdiv(count, ROWS // R)
    for tile in range(tiles):
        live = next_pair >= 0
        in_segment = (tl.maximum(next_pair, 0) // N).to(OFFSET)
        next_pair = pairs_of_tile(pairs, tile + 1, start, count, -1, R, ROWS)
        q_lo = load_at(q, in_segment * q_s + head * q_h, live, HALF, HALF)
        q_hi = load_at(q + HALF, in_segment * q_s + head * q_h, live, HALF, HALF)
        do_lo = load_at(dout, in_segment * o_s + head * o_h, live, HALF, HALF)
        do_hi = load_at(dout + HALF, in_segment * o_s + head * o_h, live, HALF, HALF)
        row_lse, row_delta, row_gate = _row_statistics(statistics, rows, in_segment, head, live, G, R)
        s = tl.dot(q_lo, tl.trans(k_lo), input_precision=PRECISION)
        s = tl.dot(q_hi, tl.trans(k_hi), s, input_precision=PRECISION)
        dp = tl.dot(do_lo, tl.trans(v_lo), input_precision=PRECISION)
        dp = tl.dot(do_hi, tl.trans(v_hi), dp, input_precision=PRECISION)
        p = tl.exp2(s * scale - row_lse[:, None])
        if tile < masked_tiles:
            again = pairs_of_tile(pairs, tile, start, count, 0, R, ROWS) // N  # rare, so not carried in registers
            p = _without_later_keys(p, first_token + again, begin, sub, L_SEL, BN)
        weighted = (p * row_gate[:, None]).to(do_lo.dtype)
        ds = (p * (dp * row_gate[:, None] - row_delta[:, None])).to(q_lo.dtype)
        # Always so, but the compiler does not know it. What is in an `if` comes after the reads of the next tile and
        # hides them; else they would come last, and the next round would begin by waiting for them.
        if tile < tiles:
            dv_lo = tl.dot(tl.trans(do_lo), weighted, dv_lo, input_precision=PRECISION)
            dv_hi = tl.dot(tl.trans(do_hi), weighted, dv_hi, input_precision=PRECISION)
            dk_lo = tl.dot(tl.trans(q_lo), ds, dk_lo, input_precision=PRECISION)
            dk_hi = tl.dot(tl.trans(q_hi), ds, dk_hi, input_precision=PRECISION)
            pair = pairs_of_tile(pairs, tile, start, count, -1, R, ROWS)
            row = tl.maximum(pair, 0).to(OFFSET) * (SUB * R) + head
            dq_lo = tl.dot(ds, k_lo, input_precision=PRECISION)
            store_at(part_dq, row * D, dq_lo, pair >= 0, HALF, HALF)
            dq_hi = tl.dot(ds, k_hi, input_precision=PRECISION)
            store_at(part_dq + HALF, row * D, dq_hi, pair >= 0, HALF, HALF)
    row = (item.to(tl.int64) * SUB + sub) * BN + tl.arange(0, BN)
    every_key = tl.full((BN,), True, tl.int1)
    store_at(part_dk, row * D, tl.trans(dk_lo), every_key, HALF, HALF)
    store_at(part_dk + HALF, row * D, tl.trans(dk_hi), every_key, HALF, HALF)
    store_at(part_dv, row * D, tl.trans(dv_lo), every_key, HALF, HALF)
    store_at(part_dv + HALF, row * D, tl.trans(dv_hi), every_key, HALF, HALF)
