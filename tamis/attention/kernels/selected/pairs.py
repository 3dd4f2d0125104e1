"""Selected attention, block by block: keys and values are held while the loop walks the tokens that chose the block.

Work is exactly the chosen pairs, whatever the choices. The price is one partial output per pair, written once and
joined in slot order by a second kernel, together with what unions gave for the token's other blocks.

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
from tamis.attention.kernels.gates import Mixture, mix, mixture_arguments
from tamis.attention.kernels.launch import (
    LOG2E,
    MOST_KEYS,
    PreparedKernel,
    launch_settings,
    read_start,
    softmax_scale,
    specializes_warps,
    start_argument,
    unit_last_stride,
)  # fmt: skip
from tamis.attention.kernels.selected.items import (
    block_tokens,
    keys_of_block,
    locate_item,
    masked_tiles_of,
    pairs_of_tile,
    rows_of_tile,
)  # fmt: skip
from tamis.attention.kernels.selected.layout import MOST_CHUNKS, Layout, chunks_of, merge_launch, sizes_of
from tamis.attention.kernels.selected.lists import chunks_of_pairs, item_arguments
from tamis.attention.kernels.selected.merges import merge_outputs
from tamis.attention.kernels.selected.union import Unions, load_at, store_at, union_forward
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import PackedTables
from tamis.attention.spec import NSASpec, Start, latest_start

CACHED_BYTES = 12 << 20  # bytes of a group's queries in a segment: each is read once per slot, so it should stay in L2
MIXED_UP_TO = 64  # head dim; above, the kernel that joins partial outputs lacks registers to mix them; measured
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
    mixture: Mixture | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[B,S,H,D]` before the gate, and natural log-sum-exp `[B,H,S]` in float32; the `mixture`, if there is one.

    Rows that see nothing give 0 and −inf. Queries stand at `start … start+S−1` over the keys of all tokens so far.
    The host looks at the ids, and waits for them, unless the inputs are trusted.
    """
    if not trusted:
        check_selected(q_BSHD, k_BTGD, v_BTGD, ids_BSGn, spec, latest_start(start))
    q, k, v, ids = (unit_last_stride(x) for x in (q_BSHD, k_BTGD, v_BTGD, ids_BSGn))
    blocks = spec.selection_blocks(packed.longest if packed else latest_start(start) + q.shape[1])
    if blocks <= DENSE_UP_TO * spec.n_sel:
        out, lse, _ = union_forward(q, k, v, ids, spec, True, start, packed, scale, mixture)
        return out, lse
    short_unions = union_forward(q, k, v, ids, spec, False, start, packed, scale)
    return pairs_forward(q, k, v, ids, spec, short_unions, start=start, packed=packed, scale=scale, mixture=mixture)


def reads_rows(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, spec: NSASpec, start: Start = 0) -> bool:
    """Whether `pairs_on_hopper.py` has the kernel for these."""
    from_the_first, heads_per_group = start_argument(start) is None, q_BSHD.shape[2] // k_BTGD.shape[2]
    fits = from_the_first and spec.l_sel == MOST_KEYS and heads_per_group <= 64  # the rows of a tile
    return fits and specializes_warps(q_BSHD, k_BTGD, v_BTGD)


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
    mixture: Mixture | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of the selected branch; `rest_of` is what the other form gave and left over.

    `early` forces Triton's kernel to read the next tile's queries before the softmax of the current one, or after it.
    """
    batch, tokens, heads, dim = q_BSHD.shape
    bytes_per_token = heads // ids_BSGn.shape[2] * dim * q_BSHD.element_size()
    segment = max(1, cached_bytes // bytes_per_token)
    chunks = chunks_of(q_BSHD, spec, packed, MOST_CHUNKS)
    layout = Layout.of(ids_BSGn, spec, chunks, chunk, latest_start(start), segment, packed)
    sizes = sizes_of(q_BSHD, layout, spec)
    parts = sizes["SUB"]
    settings = launch_settings("pairs", q_BSHD, sizes["R"])
    early = settings["num_stages"] == 2 if early is None else early  # with more, reads are under way long enough
    if rest_of is None:
        out = empty((batch, tokens, heads, dim), q_BSHD.dtype, q_BSHD.device)
        lse = empty((batch, heads, tokens), torch.float32, q_BSHD.device)
        choices = ids_BSGn
    else:
        out, lse, unions = rest_of
        assert unions.rest is not None  # of every tile's whole union nothing is left over
        choices = unions.rest
    pair_rows = layout.pairs_per_chunk * parts * sizes["R"]
    part_out = empty((pair_rows, dim), q_BSHD.dtype, q_BSHD.device)
    part_lse = empty((pair_rows,), torch.float32, q_BSHD.device)
    merge_grid, merge_sizes = merge_launch(layout, sizes)
    scale = softmax_scale(q_BSHD, scale) * LOG2E
    strides = *q_BSHD.stride()[:3], *k_BTGD.stride()[:3], *v_BTGD.stride()[:3]
    in_gluon = reads_rows(q_BSHD, k_BTGD, v_BTGD, spec, start)
    if in_gluon:
        # Here, because not every Triton has Gluon.
        from tamis.attention.kernels.selected.pairs_on_hopper import walk_items
    mixed: tuple[Tensor | None, ...] = ()
    joins_mix = dim <= MIXED_UP_TO
    for lists in chunks_of_pairs(choices, layout, packed):
        tensors = q_BSHD, k_BTGD, v_BTGD, part_out, part_lse, *item_arguments(lists, layout, packed)
        if in_gluon:
            walk_items(layout.items_per_chunk, (*tensors, scale, *strides), sizes)
        else:
            _forward_items[(layout.items_per_chunk, parts)](
                *tensors, start_argument(start), scale, *strides, EARLY=early, **sizes, **settings
            )
        mixed = mixed or mixture_arguments(mixture if joins_mix else None)
        merge_outputs[merge_grid](
            part_out, part_lse, choices, out, lse, *mixed, lists.first_segment,
            layout.segments_per_sequence, layout.segment, tokens, layout.segments, *choices.stride()[:3],
            BEGUN=rest_of is not None, **merge_sizes,
        )  # fmt: skip
    if mixture is not None and not joins_mix:
        mix(mixture, out)
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
