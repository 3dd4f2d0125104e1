"""Selected attention, block by block: keys and values stay at hand while the tokens that chose the block pass by.

Work is exactly the chosen pairs, whatever the choices. The price is one partial result per pair (an output in the
forward pass, a query gradient in the backward pass), written once and summed in slot order by a second kernel.

Rows of a tile are tokens × heads of the group: six heads × 21 tokens fill 126 of 128 rows.
Shapes: B batch, S tokens, H query heads, G groups, R = H/G heads per group, D head dim, n slots (n_sel).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.selected_lists import ITEM, Chunk, Layout, chunks_of_pairs
from tamis.attention.selected_rows import LOG2E, key_tiles, launch_settings, load_rows, store_rows
from tamis.attention.selected_union import Unions
from tamis.attention.spec import NSASpec
from tamis.attention.tiles import padded, precision

# Chunks of a large call: fewer make longer lists and take more memory, n_sel / chunks times the size of q.
FORWARD_CHUNKS = 4
BACKWARD_CHUNKS = 5  # memory is short here: the outputs of all branches and all gradients are there too


def forward(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    ids_BSGn: Tensor,
    spec: NSASpec,
    rest_of: tuple[Tensor, Tensor, Unions] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of the selected branch; with `rest_of`, of the tiles the other form left over."""
    batch, tokens, heads, dim = q_BSHD.shape
    layout = Layout.of(ids_BSGn, spec, FORWARD_CHUNKS, chunk)
    sizes = _sizes(q_BSHD, layout, spec)
    parts = sizes["SUB"]
    settings = launch_settings("forward", q_BSHD, sizes["R"])
    if rest_of is None:
        out = torch.empty((batch, tokens, heads, dim), dtype=q_BSHD.dtype, device=q_BSHD.device)
        lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q_BSHD.device)
        unions = None
    else:
        out, lse, unions = rest_of
    pair_rows = layout.pairs_per_chunk * parts * sizes["R"]
    part_out = torch.empty((pair_rows, dim), dtype=q_BSHD.dtype, device=q_BSHD.device)
    part_lse = torch.empty(pair_rows, dtype=torch.float32, device=q_BSHD.device)
    merge_grid, merge_sizes = _merge_launch(layout, sizes)
    scale = dim**-0.5 * LOG2E
    for lists in chunks_of_pairs(ids_BSGn, layout, unions):
        _forward_items[(layout.items_per_chunk, parts)](
            q_BSHD, k_BSGD, v_BSGD, part_out, part_lse, *_item_arguments(lists, layout), scale,
            *q_BSHD.stride()[:3], *k_BSGD.stride()[:3], *v_BSGD.stride()[:3],
            **sizes, **settings,
        )  # fmt: skip
        _merge_outputs[merge_grid](
            part_out, part_lse, ids_BSGn, unions.counts if unions else ids_BSGn, out, lse, lists.first_segment,
            layout.segments_per_sequence, layout.segment, tokens, layout.segments, *ids_BSGn.stride()[:3],
            TILE=unions.tile if unions else None, **merge_sizes,
        )  # fmt: skip
    return out, lse


def backward(
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
    accumulate_dq: bool,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values; that of the queries goes to `dq`. `gates` are this branch's alone."""
    batch, tokens, _, dim = q_BSHD.shape
    layout = Layout.of(ids_BSGn, spec, BACKWARD_CHUNKS, chunk)
    sizes = _sizes(q_BSHD, layout, spec)
    parts, groups = sizes["SUB"], layout.groups
    settings = launch_settings("backward", q_BSHD, sizes["R"])
    device = q_BSHD.device
    dk = torch.empty((batch, tokens, groups, dim), dtype=k_BSGD.dtype, device=device)
    dv = torch.empty_like(dk)
    # A sequence of several segments adds up its gradients in float32 and rounds once, with the last segment.
    several = layout.segments_per_sequence > 1
    dk_sum = torch.empty(dk.shape, dtype=torch.float32, device=device) if several else dk
    dv_sum = torch.empty_like(dk_sum) if several else dv
    part_dq = torch.empty((layout.pairs_per_chunk * parts * sizes["R"], dim), dtype=q_BSHD.dtype, device=device)
    part_dkv = torch.empty((2, layout.items_per_chunk, parts, sizes["BN"], dim), dtype=torch.float32, device=device)
    merge_grid, merge_sizes = _merge_launch(layout, sizes)
    scale = dim**-0.5
    statistics = _gather_statistics(lse_BHS, delta_BHS, gates_BSH)
    for lists in chunks_of_pairs(ids_BSGn, layout):
        _backward_items[(layout.items_per_chunk, parts)](
            q_BSHD, k_BSGD, v_BSGD, dout_BSHD, statistics, lse_BHS.numel(), part_dq, part_dkv[0], part_dkv[1],
            dk_sum, dv_sum, dk, dv, lists.list_items, *_item_arguments(lists, layout), scale * LOG2E, scale,
            *q_BSHD.stride()[:3], *k_BSGD.stride()[:3], *v_BSGD.stride()[:3], *dout_BSHD.stride()[:3],
            **sizes, **settings,
        )  # fmt: skip
        _merge_query_gradients[merge_grid](
            part_dq, ids_BSGn, dq_BSHD, lists.first_segment, layout.segments_per_sequence, layout.segment, tokens,
            layout.segments, scale, *ids_BSGn.stride()[:3], *dq_BSHD.stride()[:3],
            ADD=accumulate_dq, **merge_sizes,
        )  # fmt: skip
        _merge_key_gradients[(layout.lists_per_chunk, parts * sizes["BN"] // 16)](
            part_dkv[0], part_dkv[1], lists.list_first, lists.list_items, dk_sum, dv_sum, dk, dv, lists.first_segment,
            layout.segments_per_sequence, layout.segments, layout.blocks, tokens, scale,
            G=sizes["G"], SUB=parts, L_SEL=spec.l_sel, BN=sizes["BN"], D=dim, BD=sizes["BD"], KEYS=16,
        )  # fmt: skip
    return dk, dv


def _gather_statistics(lse_BHS: Tensor, delta_BHS: Tensor, gates_BSH: Tensor) -> Tensor:
    """Log-sum-exp (base 2), delta and gate, as float32 [3,B,S,H]: a token's heads lie together, as tiles read them."""
    batch, heads, tokens = lse_BHS.shape
    statistics = torch.empty((3, batch, tokens, heads), dtype=torch.float32, device=lse_BHS.device)
    _transpose_statistics[(triton.cdiv(tokens, 64), batch)](
        lse_BHS, delta_BHS, gates_BSH, statistics, tokens, statistics[0].numel(), *gates_BSH.stride(),
        H=heads, BH=triton.next_power_of_2(heads), BLOCK=64,
    )  # fmt: skip
    return statistics


def _sizes(q_BSHD: Tensor, layout: Layout, spec: NSASpec) -> dict[str, Any]:
    """Compile-time sizes: keys at hand BN (a power of two), SUB such tiles per block, padded head dim BD."""
    heads, dim = q_BSHD.shape[2:]
    keys, parts = key_tiles(spec)
    return {
        "G": layout.groups,
        "R": heads // layout.groups,
        "N": layout.slots,
        "L_SEL": spec.l_sel,
        "SUB": parts,
        "BN": keys,
        "D": dim,
        "BD": padded(dim),
        "PRECISION": precision(q_BSHD.dtype),
        "ITEM": ITEM,
        "OFFSET": _offset_type(q_BSHD, layout, parts),
    }


def _offset_type(q_BSHD: Tensor, layout: Layout, parts: int) -> tl.dtype:
    """Offsets from a segment's first token take 32 bits (half the registers) unless the segment is very long."""
    heads, dim = q_BSHD.shape[2:]
    _, token_stride, head_stride, _ = (abs(stride) for stride in q_BSHD.stride())
    reach = max(
        layout.segment * layout.slots * parts * (heads // layout.groups) * dim,
        layout.segment * max(token_stride, heads * dim) + heads * head_stride,
    )
    return tl.int32 if reach < 2**31 else tl.int64


def _item_arguments(lists: Chunk, layout: Layout) -> tuple:
    return (
        lists.pairs, lists.item_list, lists.item_start, lists.item_count, lists.first_segment,
        layout.segments_per_sequence, layout.segment, layout.blocks, layout.tokens,
    )  # fmt: skip


def _merge_launch(layout: Layout, sizes: dict) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for the kernels that join a token's partial results, in tiles of tokens × heads."""
    rows = max(2048 // sizes["BD"], triton.next_power_of_2(sizes["R"]))
    grid = (triton.cdiv(layout.segment, rows // sizes["R"]) * layout.segments_per_chunk * layout.groups,)
    slots = {"BS": triton.next_power_of_2(sizes["N"]), "BP": triton.next_power_of_2(sizes["N"] * sizes["SUB"])}
    return grid, {name: sizes[name] for name in ("G", "R", "N", "SUB", "D", "BD")} | slots | {"ROWS": rows}


@triton.jit
def _place_of_list(list_id, first_segment, per_sequence, segment, blocks, G: tl.constexpr):
    """Sequence, first token of the segment, group, block and (segment, group) index in the chunk."""
    segment_group = list_id // blocks
    index = first_segment + segment_group // G
    sequence = (index // per_sequence).to(tl.int64)
    first_token = (index % per_sequence) * segment
    return sequence, first_token, (segment_group % G).to(tl.int64), list_id % blocks, segment_group


@triton.jit
def _masked_tiles(
    pairs, start, count, end, N: tl.constexpr, TOKENS: tl.constexpr, ALL: tl.constexpr, ITEM: tl.constexpr
):
    """How many tiles at the head of an item hold tokens that do not see the whole block (they lie in it, and tokens are
    ascending). All of them where a block does not fill its key tiles."""
    if ALL:
        return tl.cdiv(count, TOKENS)
    entry = tl.arange(0, ITEM)
    pair = tl.load(pairs + start + entry, mask=entry < count, other=2147483647)
    return tl.cdiv(tl.sum((pair // N < end - 1).to(tl.int32), 0), TOKENS)


@triton.jit
def _rows_of_tile(tile, count, R: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a tile of tokens × heads exist."""
    row = tl.arange(0, ROWS)
    return (row < (ROWS // R) * R) & (tile * (ROWS // R) + row // R < count)


@triton.jit
def _pairs_of_tile(pairs, tile, start, count, missing: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr):
    """The pair of every row of a tile of tokens × heads, `missing` where the row does not exist."""
    entry = tile * (ROWS // R) + tl.arange(0, ROWS) // R
    return tl.load(pairs + start + entry, mask=_rows_of_tile(tile, count, R, ROWS), other=missing)


@triton.jit(do_not_specialize=["first_segment"])
def _forward_items(
    q, k, v, part_out, part_lse,
    pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks, tokens, scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr, ITEM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One item: softmax over one block's keys alone, for every token of the item; `scale` includes log2(e)."""
    item = tl.program_id(0)
    sub = tl.program_id(1)
    count = tl.load(item_count + item)
    if count == 0:
        return
    start = tl.load(item_start + item)
    sequence, first_token, group, block, segment_group = _place_of_list(
        tl.load(item_list + item), first_segment, per_sequence, segment, blocks, G
    )
    in_block = sub * BN + tl.arange(0, BN)
    key = block * L_SEL + in_block
    key_live = (in_block < L_SEL) & (key < tokens)
    key64 = key.to(tl.int64)
    k_tile = load_rows(k + sequence * k_b + group * k_g, key64 * k_s, key_live, D, BD)
    v_tile = load_rows(v + sequence * v_b + group * v_g, key64 * v_s, key_live, D, BD)
    last_key = tl.where(key_live, key, tokens)  # keys that do not exist lie behind every token

    head = tl.arange(0, ROWS) % R
    q += sequence * q_b + first_token.to(tl.int64) * q_s + group * R * q_h
    first_row = (segment_group.to(tl.int64) * segment * N * SUB + sub) * R
    part_out += first_row * D
    part_lse += first_row
    masked_tiles = _masked_tiles(
        pairs, start, count, (block + 1) * L_SEL - first_token, N, ROWS // R, L_SEL % BN != 0, ITEM
    )
    always = tl.full((ROWS,), True, tl.int1)
    next_pair = _pairs_of_tile(pairs, 0, start, count, 0, R, ROWS)
    for tile in range(tl.cdiv(count, ROWS // R)):
        pair = next_pair
        next_pair = _pairs_of_tile(pairs, tile + 1, start, count, 0, R, ROWS)
        in_segment = (pair // N).to(OFFSET)
        token = first_token + pair // N
        q_tile = load_rows(q, in_segment * q_s + head * q_h, always, D, BD)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if tile < masked_tiles:
            s = tl.where(last_key[None, :] <= token[:, None], s, -float("inf"))
        top = tl.max(s, 1) * scale
        top = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(s * scale - top[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        o = o * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        live = _rows_of_tile(tile, count, R, ROWS)
        row = pair.to(OFFSET) * (SUB * R) + head
        store_rows(part_out, row * D, o, live, D, BD)
        tl.store(part_lse + row, tl.where(total == 0.0, -float("inf"), top + tl.log2(total)), mask=live)


@triton.jit
def _rows_of_merge(
    ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where a tile of tokens × heads of the merge kernels lies: rows that exist, sequence, token, query head, the
    token's number within the chunk and group, and how many slots it uses."""
    row = tl.arange(0, ROWS)
    tiles = tl.cdiv(segment, ROWS // R)
    in_segment = (tl.program_id(0) % tiles) * (ROWS // R) + row // R
    segment_group = tl.program_id(0) // tiles
    index = first_segment + segment_group // G
    token = (index % per_sequence) * segment + in_segment
    live = (row < (ROWS // R) * R) & (in_segment < segment) & (token < tokens) & (index < segments)
    segment_group = segment_group.to(tl.int64)
    group = segment_group % G
    sequence = (index // per_sequence).to(tl.int64)
    token = token.to(tl.int64)
    slot = tl.arange(0, BS)
    chosen = ids + sequence * i_b + group * i_g + token[:, None] * i_s + slot[None, :]
    chosen = tl.load(chosen, mask=live[:, None] & (slot < N)[None, :], other=-1)
    used = tl.sum((chosen >= 0).to(tl.int32), 1)
    return live, sequence, token, group * R + row % R, segment_group * segment + in_segment, used


@triton.jit(do_not_specialize=["first_segment"])
def _merge_outputs(
    part_out, part_lse, ids, union_counts, out, lse, first_segment, per_sequence, segment, tokens, segments,
    i_b, i_s, i_g,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, SUB: tl.constexpr, BP: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the softmaxes of a token's blocks, weighted by their log-sum-exps (base 2)."""
    live, sequence, token, head, local_token, used = _rows_of_merge(
        ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g, G, R, N, BS, ROWS
    )
    if TILE is not None:  # the rest was finished tile by tile
        tile = (sequence * G + head // R) * tl.cdiv(tokens, TILE) + token // TILE
        live = live & (tl.load(union_counts + tile * 2, mask=live, other=0) < 0)
        used = tl.where(live, used, 0)
        if tl.max(live.to(tl.int32), 0) == 0:
            return
    first_part = local_token * (N * SUB) * R + head % R
    part = tl.arange(0, BP)
    tops = tl.load(
        part_lse + first_part[:, None] + part[None, :] * R,
        mask=part[None, :] < (used * SUB)[:, None],
        other=-float("inf"),
    )
    top = tl.max(tops, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(tops - top[:, None]), 1)
    acc = tl.zeros((ROWS, BD), tl.float32)
    for index in tl.range(0, N * SUB, loop_unroll_factor=8):  # the reads of eight parts are under way together
        exists = index < used * SUB
        weight = tl.exp2(tl.load(part_lse + first_part + index * R, mask=exists, other=-float("inf")) - top)
        acc += load_rows(part_out, (first_part + index * R) * D, exists, D, BD).to(tl.float32) * weight[:, None]
    acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    store_rows(out, ((sequence * tokens + token) * (G * R) + head) * D, acc, live, D, BD)
    natural = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + (sequence * (G * R) + head) * tokens + token, natural, mask=live)


@triton.jit
def _transpose_statistics(
    lse, delta, gates, statistics, tokens, rows, g_b, g_s, g_h, H: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr
):
    sequence = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.arange(0, BH)[None, :]
    live = (token < tokens) & (head < H)
    source = (sequence * H + head) * tokens + token
    target = statistics + (sequence * tokens + token) * H + head
    tl.store(target, tl.load(lse + source, mask=live) * 1.4426950408889634, mask=live)
    tl.store(target + rows, tl.load(delta + source, mask=live), mask=live)
    gate = tl.load(gates + sequence * g_b + token * g_s + head * g_h, mask=live)
    tl.store(target + 2 * rows, gate.to(tl.float32), mask=live)


@triton.jit(do_not_specialize=["first_segment"])
def _backward_items(
    q, k, v, dout, statistics, rows, part_dq, part_dk, part_dv, dk_sum, dv_sum, dk_out, dv_out, list_items,
    pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks, tokens, scale, dk_scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, o_b, o_s, o_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr, ITEM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One item: all five products of the backward pass for one block's keys and the item's tokens.

    Scores are held transposed (keys × rows), so that probabilities feed the products for dV and dK from registers.
    """
    item = tl.program_id(0)
    sub = tl.program_id(1)
    count = tl.load(item_count + item)
    if count == 0:
        return
    start = tl.load(item_start + item)
    list_id = tl.load(item_list + item)
    sequence, first_token, group, block, segment_group = _place_of_list(
        list_id, first_segment, per_sequence, segment, blocks, G
    )
    in_block = sub * BN + tl.arange(0, BN)
    key = block * L_SEL + in_block
    key_live = (in_block < L_SEL) & (key < tokens)
    key64 = key.to(tl.int64)
    k_tile = load_rows(k + sequence * k_b + group * k_g, key64 * k_s, key_live, D, BD)
    v_tile = load_rows(v + sequence * v_b + group * v_g, key64 * v_s, key_live, D, BD)
    last_key = tl.where(key_live, key, tokens)

    head = tl.arange(0, ROWS) % R
    first_token64 = first_token.to(tl.int64)
    q += sequence * q_b + first_token64 * q_s + group * R * q_h
    dout += sequence * o_b + first_token64 * o_s + group * R * o_h
    statistics += (sequence * tokens + first_token64) * (G * R) + group * R
    part_dq += (segment_group.to(tl.int64) * segment * N * SUB + sub) * R * D
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    masked_tiles = _masked_tiles(
        pairs, start, count, (block + 1) * L_SEL - first_token, N, ROWS // R, L_SEL % BN != 0, ITEM
    )
    next_pair = _pairs_of_tile(pairs, 0, start, count, -1, R, ROWS)
    for tile in range(tl.cdiv(count, ROWS // R)):
        pair = tl.maximum(next_pair, 0)
        live = next_pair >= 0
        next_pair = _pairs_of_tile(pairs, tile + 1, start, count, -1, R, ROWS)
        in_segment = (pair // N).to(OFFSET)
        token = first_token + pair // N
        q_tile = load_rows(q, in_segment * q_s + head * q_h, live, D, BD)
        do_tile = load_rows(dout, in_segment * o_s + head * o_h, live, D, BD)
        row_statistics = statistics + in_segment * (G * R) + head
        row_lse = tl.load(row_statistics, mask=live, other=float("inf"))  # p = 0: missing rows add nothing
        row_delta = tl.load(row_statistics + rows, mask=live, other=0.0)
        row_gate = tl.load(row_statistics + 2 * rows, mask=live, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)  # under way while p is computed
        p = tl.exp2(s * scale - row_lse[:, None])
        if tile < masked_tiles:
            p = tl.where(last_key[None, :] <= token[:, None], p, 0.0)
        weighted = (p * row_gate[:, None]).to(do_tile.dtype)
        dv = tl.dot(tl.trans(weighted), do_tile, dv, input_precision=PRECISION)
        ds = (p * (dp * row_gate[:, None] - row_delta[:, None])).to(q_tile.dtype)
        dk = tl.dot(tl.trans(ds), q_tile, dk, input_precision=PRECISION)
        dq = tl.dot(ds, k_tile, input_precision=PRECISION)
        row = pair.to(OFFSET) * (SUB * R) + head
        store_rows(part_dq, row * D, dq, live, D, BD)
    if tl.load(list_items + list_id) == 1:
        _add_key_gradients(
            dk, dv, in_block, block, group, first_segment + segment_group // G, dk_sum, dv_sum, dk_out, dv_out,
            per_sequence, tokens, dk_scale, G, L_SEL, D, BD,
        )  # fmt: skip
    else:
        row = (item.to(tl.int64) * SUB + sub) * BN + tl.arange(0, BN)
        every_key = tl.full((BN,), True, tl.int1)
        store_rows(part_dk, row * D, dk, every_key, D, BD)
        store_rows(part_dv, row * D, dv, every_key, D, BD)


@triton.jit(do_not_specialize=["first_segment"])
def _merge_query_gradients(
    part_dq, ids, dq, first_segment, per_sequence, segment, tokens, segments, scale, i_b, i_s, i_g, dq_b, dq_s, dq_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, SUB: tl.constexpr, BP: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    live, sequence, token, head, local_token, used = _rows_of_merge(
        ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g, G, R, N, BS, ROWS
    )
    first_part = local_token * (N * SUB) * R + head % R
    acc = tl.zeros((ROWS, BD), tl.float32)
    for index in tl.range(0, N * SUB, loop_unroll_factor=8):
        acc += load_rows(part_dq, (first_part + index * R) * D, index < used * SUB, D, BD).to(tl.float32)
    acc = acc * scale
    target = sequence * dq_b + token * dq_s + head * dq_h
    if ADD:
        acc += load_rows(dq, target, live, D, BD).to(tl.float32)
    store_rows(dq, target, acc, live, D, BD)


@triton.jit(do_not_specialize=["first_segment"])
def _merge_key_gradients(
    part_dk, part_dv, list_first, list_items, dk_sum, dv_sum, dk, dv,
    first_segment, per_sequence, segments, blocks, tokens, scale,
    G: tl.constexpr, SUB: tl.constexpr, L_SEL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Add up the items of the lists that have several, or none; a list of one item was finished by the item itself."""
    list_id = tl.program_id(0)
    segment_group = list_id // blocks
    index = first_segment + segment_group // G
    items = tl.load(list_items + list_id)
    if (index >= segments) | (items == 1):
        return
    in_block = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    first = tl.load(list_first + list_id).to(tl.int64)
    always = tl.full((KEYS,), True, tl.int1)
    dk_acc = tl.zeros((KEYS, BD), tl.float32)
    dv_acc = tl.zeros((KEYS, BD), tl.float32)
    for item in tl.range(0, items, loop_unroll_factor=4):
        row = (first + item) * (SUB * BN) + in_block
        dk_acc += load_rows(part_dk, row * D, always, D, BD)
        dv_acc += load_rows(part_dv, row * D, always, D, BD)
    _add_key_gradients(
        dk_acc, dv_acc, in_block, list_id % blocks, segment_group % G, index, dk_sum, dv_sum, dk, dv,
        per_sequence, tokens, scale, G, L_SEL, D, BD,
    )  # fmt: skip


@triton.jit
def _add_key_gradients(
    dk_acc, dv_acc, in_block, block, group, segment_index, dk_sum, dv_sum, dk, dv, per_sequence, tokens, scale,
    G: tl.constexpr, L_SEL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add a whole list's gradients onto what earlier segments of the sequence gave; round with the last segment."""
    sequence = (segment_index // per_sequence).to(tl.int64)
    part = segment_index % per_sequence
    last = part == per_sequence - 1
    key = block * L_SEL + in_block
    live = (in_block < L_SEL) & (key < tokens)
    target = ((sequence * tokens + key) * G + group) * D
    dk_acc += load_rows(dk_sum, target, live & (part > 0), D, BD).to(tl.float32)
    dv_acc += load_rows(dv_sum, target, live & (part > 0), D, BD).to(tl.float32)
    store_rows(dk_sum, target, dk_acc, live & (part < per_sequence - 1), D, BD)
    store_rows(dv_sum, target, dv_acc, live & (part < per_sequence - 1), D, BD)
    store_rows(dk, target, dk_acc * scale, live & last, D, BD)
    store_rows(dv, target, dv_acc, live & last, D, BD)
