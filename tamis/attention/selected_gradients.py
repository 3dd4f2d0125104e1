"""Gradients of selected attention, block by block: one sweep over the chosen pairs gives all three.

dK and dV of a block stay in registers while the tokens that chose it pass by; each pair writes one partial query
gradient, and a second kernel adds them in slot order. No float atomics: sums have a fixed order.

Shapes: B batch, S tokens, H query heads, G groups, R = H/G heads per group, D head dim, n slots (n_sel).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.selected_items import (
    item_arguments,
    masked_tiles_of,
    merge_launch,
    pairs_of_tile,
    place_of_list,
    rows_of_merge,
    sizes_of,
)
from tamis.attention.selected_lists import Layout, chunks_of_pairs
from tamis.attention.selected_rows import launch_settings, load_rows, store_rows
from tamis.attention.spec import NSASpec
from tamis.attention.tiles import LOG2E

CHUNKS = 5  # of a large call; memory is short here, with the outputs of all branches and all gradients about


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
    layout = Layout.of(ids_BSGn, spec, CHUNKS, chunk)
    sizes = sizes_of(q_BSHD, layout, spec)
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
    merge_grid, merge_sizes = merge_launch(layout, sizes)
    scale = dim**-0.5
    statistics = _gather_statistics(lse_BHS, delta_BHS, gates_BSH)
    for lists in chunks_of_pairs(ids_BSGn, layout):
        _backward_items[(layout.items_per_chunk, parts)](
            q_BSHD, k_BSGD, v_BSGD, dout_BSHD, statistics, lse_BHS.numel(), part_dq, part_dkv[0], part_dkv[1],
            dk_sum, dv_sum, dk, dv, lists.list_items, *item_arguments(lists, layout), scale * LOG2E, scale,
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
    # One dimension, as everywhere: a grid's second takes no more than 65,535, and a batch may be larger.
    _transpose_statistics[(triton.cdiv(tokens, 64) * batch,)](
        lse_BHS, delta_BHS, gates_BSH, statistics, tokens, statistics[0].numel(), *gates_BSH.stride(),
        H=heads, BH=triton.next_power_of_2(heads), BLOCK=64,
    )  # fmt: skip
    return statistics


@triton.jit
def _transpose_statistics(
    lse, delta, gates, statistics, tokens, rows, g_b, g_s, g_h, H: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr
):
    tiles = tl.cdiv(tokens, BLOCK)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
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
    sequence, first_token, group, block, segment_group = place_of_list(
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
    masked_tiles = masked_tiles_of(
        pairs, start, count, (block + 1) * L_SEL - first_token, N, ROWS // R, L_SEL % BN != 0, ITEM
    )
    next_pair = pairs_of_tile(pairs, 0, start, count, -1, R, ROWS)
    for tile in range(tl.cdiv(count, ROWS // R)):
        pair = tl.maximum(next_pair, 0)
        live = next_pair >= 0
        next_pair = pairs_of_tile(pairs, tile + 1, start, count, -1, R, ROWS)
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
    live, sequence, token, head, local_token, used = rows_of_merge(
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
