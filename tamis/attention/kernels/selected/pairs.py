"""Selected attention, block by block: keys and values are held while the loop walks the tokens that chose the block.

Work is exactly the chosen pairs, whatever the choices. The price is one partial output per pair, written once and
joined in slot order by a second kernel.

Rows of a tile are tokens × heads of the group: six heads × 21 tokens fill 126 of 128 rows.
Shapes: B batch, S queries, T = start + S keys, H query heads, G groups, R = H/G heads per group, D head dim,
n slots (n_sel). A kernel that gets None for `start` is compiled without it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.checks import check_branch, check_ids, check_queries, check_start
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedKernel,
    launch_settings,
    read_start,
    softmax_scale,
    start_argument,
    unit_last_stride,
)  # fmt: skip
from tamis.attention.kernels.selected.items import (
    block_tokens,
    keys_of_block,
    locate_item,
    masked_tiles_of,
    pairs_of_tile,
    rows_of_merge,
    rows_of_tile,
)  # fmt: skip
from tamis.attention.kernels.selected.layout import Layout, merge_launch, sizes_of
from tamis.attention.kernels.selected.lists import chunks_of_pairs, item_arguments
from tamis.attention.kernels.selected.union import Unions, load_at, store_at, union_forward
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import PackedTables
from tamis.attention.spec import NSASpec, Start, latest_start

CHUNKS = 4  # of a large call: fewer make longer lists and take more memory, n_sel / CHUNKS times the size of q
TOGETHER = tl.constexpr(8)  # partial outputs of a token that are read at once
CACHED_BYTES = 12 << 20  # bytes of a group's queries in a segment: each is read once per slot, so it should stay in L2
DENSE_UP_TO = 4  # times n_sel blocks: in sequences this short the union beats the lists whatever was chosen; measured


def selected_forward(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    ids_BSGn: Tensor,
    spec: NSASpec,
    start: Start = 0,
    trusted: bool = False,
    packed: PackedTables | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[B,S,H,D]` before the gate, and natural log-sum-exp `[B,H,S]` in float32.

    Rows that see nothing give 0 and −inf. Queries stand at `start … start+S−1` over the keys of all tokens so far.
    The host looks at the ids, and waits for them, unless the inputs are trusted.
    """
    if not trusted:
        check_selected(q_BSHD, k_BTGD, v_BTGD, ids_BSGn, spec, latest_start(start))
    q, k, v, ids = (unit_last_stride(x) for x in (q_BSHD, k_BTGD, v_BTGD, ids_BSGn))
    blocks = spec.selection_blocks(packed.longest if packed else latest_start(start) + q.shape[1])
    if blocks <= DENSE_UP_TO * spec.n_sel:
        out, lse, _ = union_forward(q, k, v, ids, spec, True, start, packed, scale)
        return out, lse
    tiles_with_short_unions = union_forward(q, k, v, ids, spec, False, start, packed, scale)
    return pairs_forward(q, k, v, ids, spec, tiles_with_short_unions, start=start, packed=packed, scale=scale)


def check_selected(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, spec: NSASpec, start: int = 0) -> None:
    check_queries(q)
    check_start(start)
    tokens = start + q.shape[1]
    groups = check_branch(q, tokens, k_sel=k, v_sel=v)
    check_ids(ids, q, groups, spec.selection_blocks(tokens), spec)


def pairs_forward(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    ids_BSGn: Tensor,
    spec: NSASpec,
    rest_of: tuple[Tensor, Tensor, Unions] | None = None,
    chunk: int | None = None,
    start: Start = 0,
    cached_bytes: int = CACHED_BYTES,
    early: bool | None = None,
    packed: PackedTables | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of the selected branch; with `rest_of`, of the tiles the other form left over.

    `early` forces the next tile's queries to be read before the softmax of the current one, or after it.
    """
    batch, tokens, heads, dim = q_BSHD.shape
    bytes_per_token = heads // ids_BSGn.shape[2] * dim * q_BSHD.element_size()
    segment = max(1, cached_bytes // bytes_per_token)
    layout = Layout.of(ids_BSGn, spec, CHUNKS, chunk, latest_start(start), segment, packed)
    sizes = sizes_of(q_BSHD, layout, spec)
    parts = sizes["SUB"]
    settings = launch_settings("pairs", q_BSHD, sizes["R"])
    early = settings["num_stages"] == 2 if early is None else early  # with more, reads are under way long enough
    if rest_of is None:
        out = empty((batch, tokens, heads, dim), q_BSHD.dtype, q_BSHD.device)
        lse = empty((batch, heads, tokens), torch.float32, q_BSHD.device)
        unions = None
    else:
        out, lse, unions = rest_of
    pair_rows = layout.pairs_per_chunk * parts * sizes["R"]
    part_out = empty((pair_rows, dim), q_BSHD.dtype, q_BSHD.device)
    part_lse = empty((pair_rows,), torch.float32, q_BSHD.device)
    merge_grid, merge_sizes = merge_launch(layout, sizes)
    scale = softmax_scale(q_BSHD, scale) * LOG2E
    for lists in chunks_of_pairs(ids_BSGn, layout, unions, packed):
        _forward_items[(layout.items_per_chunk, parts)](
            q_BSHD, k_BTGD, v_BTGD, part_out, part_lse, *item_arguments(lists, layout, packed),
            start_argument(start), scale, *q_BSHD.stride()[:3], *k_BTGD.stride()[:3], *v_BTGD.stride()[:3],
            EARLY=early, **sizes, **settings,
        )  # fmt: skip
        _merge_outputs[merge_grid](
            part_out, part_lse, ids_BSGn, unions.counts if unions else ids_BSGn, out, lse, lists.first_segment,
            layout.segments_per_sequence, layout.segment, tokens, layout.segments, *ids_BSGn.stride()[:3],
            TILE=unions.tile if unions else None, **merge_sizes,
        )  # fmt: skip
    return out, lse


@PreparedKernel
@triton.jit(do_not_specialize=["first_segment", "start", "per_sequence"])
def _forward_items(
    q, k, v, part_out, part_lse,
    pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks, tokens, table,
    bounds, start, scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One item: softmax over one block's keys alone, for every token of the item; `scale` includes log2(e)."""
    item = tl.program_id(0)
    sub = tl.program_id(1)
    count = tl.load(item_count + item)
    if count == 0:
        return
    first_pair, _, sequence, first_token, group, block, segment_group = locate_item(
        item, item_list, item_start, first_segment, per_sequence, segment, blocks, table, G
    )
    keys, first_position = tokens, first_token
    if start is not None:
        start = read_start(start)
        keys, first_position = keys + start, first_position + start
    _, key, key_live = keys_of_block(bounds, block, sub, keys, L_SEL, BN)
    begin, _ = block_tokens(bounds, block, keys, L_SEL)
    key64 = key.to(tl.int64)
    k_tile = load_at(k + sequence * k_b + group * k_g, key64 * k_s, key_live, D, BD)
    v_tile = load_at(v + sequence * v_b + group * v_g, key64 * v_s, key_live, D, BD)
    last_key = tl.where(key_live, key, keys)  # keys that do not exist lie behind every token

    head = tl.arange(0, ROWS) % R
    q += sequence * q_b + first_token.to(tl.int64) * q_s + group * R * q_h
    first_row = (segment_group.to(tl.int64) * segment * N * SUB + sub) * R
    part_out += first_row * D
    part_lse += first_row
    masked_tiles = masked_tiles_of(pairs, first_pair, count, begin + L_SEL - first_position, N, ROWS // R, L_SEL, BN)
    always = tl.full((ROWS,), True, tl.int1)
    next_pair = pairs_of_tile(pairs, 0, first_pair, count, 0, R, ROWS)
    tiles = tl.cdiv(count, ROWS // R)
    for tile in range(tiles):
        pair = next_pair
        next_pair = pairs_of_tile(pairs, tile + 1, first_pair, count, 0, R, ROWS)
        in_segment = (pair // N).to(OFFSET)
        q_tile = load_at(q, in_segment * q_s + head * q_h, always, D, BD)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if EARLY:
            # Always so, but the compiler does not know it. What is in an `if` comes after the reads of the next tile
            # and hides them; else they would come last, and the next round would begin by waiting for them.
            if tile < tiles:
                pair = pairs_of_tile(pairs, tile, first_pair, count, 0, R, ROWS)  # a carried one would be waited for
                _store_softmax(
                    s, v_tile, part_out, part_lse, pair, tile, count, tile < masked_tiles, first_position, last_key,
                    head, scale, R, N, SUB, D, BD, PRECISION, OFFSET, ROWS,
                )  # fmt: skip
        else:
            _store_softmax(
                s, v_tile, part_out, part_lse, pair, tile, count, tile < masked_tiles, first_position, last_key,
                head, scale, R, N, SUB, D, BD, PRECISION, OFFSET, ROWS,
            )  # fmt: skip


@triton.jit
def _store_softmax(
    s, v_tile, part_out, part_lse, pair, tile, count, masked, first_position, last_key, head, scale,
    R: tl.constexpr, N: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """From a tile's scores to its partial outputs and their log-sum-exps (base 2)."""
    if masked:
        s = tl.where(last_key[None, :] <= (first_position + pair // N)[:, None], s, -float("inf"))
    top = tl.max(s, 1) * scale
    top = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s * scale - top[:, None])
    total = tl.sum(p, 1)
    o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    o = o * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    live = rows_of_tile(tile, count, R, ROWS)
    row = pair.to(OFFSET) * (SUB * R) + head
    store_at(part_out, row * D, o, live, D, BD, ONCE=True)
    tl.store(part_lse + row, tl.where(total == 0.0, -float("inf"), top + tl.log2(total)), mask=live)


@PreparedKernel
@triton.jit(do_not_specialize=["first_segment", "per_sequence", "segments"])
def _merge_outputs(
    part_out, part_lse, ids, union_counts, out, lse, first_segment, per_sequence, segment, tokens, segments,
    i_b, i_s, i_g,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the softmaxes of a token's blocks, weighted by their log-sum-exps (base 2)."""
    live, sequence, token, head, local_token, choices = rows_of_merge(
        ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g, G, R, ROWS
    )
    if TILE is not None:  # the rest was finished tile by tile
        tile = (sequence * G + head // R) * tl.cdiv(tokens, TILE) + token // TILE
        live = live & (tl.load(union_counts + tile * 2, mask=live, other=0) < 0)
        if tl.max(live.to(tl.int32), 0) == 0:
            return
    # Slot by slot: a sum over a tile's second dimension comes in another layout, and every read that it masks would
    # wait for all warps.
    used = tl.zeros((ROWS,), tl.int32)
    for slot in tl.static_range(N):
        used += (tl.load(choices + slot, mask=live, other=-1) >= 0).to(tl.int32)
    first_part = local_token * (N * SUB) * R + tl.arange(0, ROWS) % R
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite, so that nothing is taken from infinity
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BD), tl.float32)
    for first in range(0, N * SUB, TOGETHER):
        parts = ()
        tops = ()
        for index in tl.static_range(TOGETHER):  # all reads before anything that waits for one
            rows = first_part + (first + index) * R
            read = load_at(part_out, rows * D, first + index < used * SUB, D, BD, ONCE=True)
            parts += (read,)  # type: ignore[assignment]
        for index in tl.static_range(TOGETHER):
            rows = first_part + (first + index) * R
            read = tl.load(part_lse + rows, mask=first + index < used * SUB, other=-float("inf"))
            tops += (read,)  # type: ignore[assignment]
        new_top = top
        for index in tl.static_range(TOGETHER):
            new_top = tl.maximum(new_top, tops[index])
        decay = tl.exp2(top - new_top)
        top = new_top
        total *= decay
        acc *= decay[:, None]
        for index in tl.static_range(TOGETHER):
            weight = tl.exp2(tops[index] - top)
            total += weight
            acc += parts[index].to(tl.float32) * weight[:, None]
    acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    store_at(out, ((sequence * tokens + token) * (G * R) + head) * D, acc, live, D, BD)
    natural = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + (sequence * (G * R) + head) * tokens + token, natural, mask=live)
