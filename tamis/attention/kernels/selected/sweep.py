"""The sweep over the chosen pairs that gives all three gradients: one program per item of a block's list.

dK and dV of a block stay in registers while the tokens that chose it pass by; each pair writes one partial query
gradient. Two kernels compute the same: `backward_items` for every shape, and `backward_halves`, which holds a head's
elements in two halves, so that at head dim 128 two programs share a multiprocessor.

Shapes: G groups, R heads per group, D head dim, N slots (n_sel), BN keys at hand, SUB such tiles per block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tamis.attention.kernels.selected.items import keys_of_block, masked_tiles_of, pairs_of_tile, place_of_item
from tamis.attention.kernels.selected.rows import load_rows, store_rows


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
def _statistics_of(statistics, rows, in_segment, head, live, G: tl.constexpr, R: tl.constexpr):
    """Log-sum-exp, delta and gate of a tile's rows."""
    row_statistics = statistics + in_segment * (G * R) + head
    row_lse = tl.load(row_statistics, mask=live, other=float("inf"))  # p = 0: missing rows add nothing
    row_delta = tl.load(row_statistics + rows, mask=live, other=0.0)
    row_gate = tl.load(row_statistics + 2 * rows, mask=live, other=0.0)
    return row_lse, row_delta, row_gate


@triton.jit
def _without_later_keys(p, token, block, sub, L_SEL: tl.constexpr, BN: tl.constexpr):
    """Nothing of the keys that lie behind a row's token, or behind the block."""
    ahead = token - block * L_SEL - sub * BN
    column = tl.arange(0, BN)
    visible = column[None, :] <= ahead[:, None]
    if L_SEL % BN != 0:
        visible = visible & (column < L_SEL - sub * BN)[None, :]
    return tl.where(visible, p, 0.0)


@triton.jit(do_not_specialize=["first_segment", "per_sequence"])
def backward_items(
    q, k, v, dout, statistics, rows, part_dq, part_dk, part_dv, dk_sum, dv_sum, dk_out, dv_out, list_items,
    pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks, tokens, scale, dk_scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, o_b, o_s, o_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr, ITEM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One item: all five products of the backward pass for one block's keys and the item's tokens."""
    item = tl.program_id(0)
    sub = tl.program_id(1)
    count = tl.load(item_count + item)
    if count == 0:
        return
    start, list_id, sequence, first_token, group, block, segment_group = place_of_item(
        item, item_list, item_start, first_segment, per_sequence, segment, blocks, G
    )
    in_block, key, key_live = keys_of_block(block, sub, tokens, L_SEL, BN)
    key64 = key.to(tl.int64)
    k_tile = load_rows(k + sequence * k_b + group * k_g, key64 * k_s, key_live, D, BD)
    v_tile = load_rows(v + sequence * v_b + group * v_g, key64 * v_s, key_live, D, BD)

    head = tl.arange(0, ROWS) % R
    q, dout, statistics, part_dq = _first_rows(
        q, dout, statistics, part_dq, sequence, first_token, group, segment_group, segment, sub, tokens,
        q_b, q_s, q_h, o_b, o_s, o_h, G, R, N, SUB, D,
    )  # fmt: skip
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
        row_lse, row_delta, row_gate = _statistics_of(statistics, rows, in_segment, head, live, G, R)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)  # under way while p is computed
        p = tl.exp2(s * scale - row_lse[:, None])
        if tile < masked_tiles:
            p = _without_later_keys(p, token, block, sub, L_SEL, BN)
        weighted = (p * row_gate[:, None]).to(do_tile.dtype)
        dv = tl.dot(tl.trans(weighted), do_tile, dv, input_precision=PRECISION)
        ds = (p * (dp * row_gate[:, None] - row_delta[:, None])).to(q_tile.dtype)
        dk = tl.dot(tl.trans(ds), q_tile, dk, input_precision=PRECISION)
        dq = tl.dot(ds, k_tile, input_precision=PRECISION)
        row = pair.to(OFFSET) * (SUB * R) + head
        store_rows(part_dq, row * D, dq, live, D, BD)
    if tl.load(list_items + list_id) == 1:
        part = (first_segment + segment_group // G) % per_sequence
        add_key_gradients(
            dk, dv, in_block, block, group, sequence, part > 0, part == per_sequence - 1, dk_sum, dv_sum,
            dk_out, dv_out, tokens, dk_scale, G, L_SEL, D, BD,
        )  # fmt: skip
    else:
        row = (item.to(tl.int64) * SUB + sub) * BN + tl.arange(0, BN)
        every_key = tl.full((BN,), True, tl.int1)
        store_rows(part_dk, row * D, dk, every_key, D, BD)
        store_rows(part_dv, row * D, dv, every_key, D, BD)


@triton.jit(do_not_specialize=["first_segment", "per_sequence"])
def backward_halves(
    q, k, v, dout, statistics, rows, part_dq, part_dk, part_dv,
    pairs, item_list, item_start, item_count, first_segment, per_sequence, segment, blocks, tokens, scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g, o_b, o_s, o_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr, ITEM: tl.constexpr,
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
    start, _, sequence, first_token, group, block, segment_group = place_of_item(
        item, item_list, item_start, first_segment, per_sequence, segment, blocks, G
    )
    _, key, key_live = keys_of_block(block, sub, tokens, L_SEL, BN)
    key64 = key.to(tl.int64)
    HALF: tl.constexpr = D // 2
    k_lo = load_rows(k + sequence * k_b + group * k_g, key64 * k_s, key_live, HALF, HALF)
    k_hi = load_rows(k + sequence * k_b + group * k_g + HALF, key64 * k_s, key_live, HALF, HALF)
    v_lo = load_rows(v + sequence * v_b + group * v_g, key64 * v_s, key_live, HALF, HALF)
    v_hi = load_rows(v + sequence * v_b + group * v_g + HALF, key64 * v_s, key_live, HALF, HALF)

    head = tl.arange(0, ROWS) % R
    q, dout, statistics, part_dq = _first_rows(
        q, dout, statistics, part_dq, sequence, first_token, group, segment_group, segment, sub, tokens,
        q_b, q_s, q_h, o_b, o_s, o_h, G, R, N, SUB, D,
    )  # fmt: skip
    dk_lo = tl.zeros((HALF, BN), tl.float32)
    dk_hi = tl.zeros((HALF, BN), tl.float32)
    dv_lo = tl.zeros((HALF, BN), tl.float32)
    dv_hi = tl.zeros((HALF, BN), tl.float32)
    masked_tiles = masked_tiles_of(
        pairs, start, count, (block + 1) * L_SEL - first_token, N, ROWS // R, L_SEL % BN != 0, ITEM
    )
    next_pair = pairs_of_tile(pairs, 0, start, count, -1, R, ROWS)
    tiles = tl.cdiv(count, ROWS // R)
    for tile in range(tiles):
        live = next_pair >= 0
        in_segment = (tl.maximum(next_pair, 0) // N).to(OFFSET)
        next_pair = pairs_of_tile(pairs, tile + 1, start, count, -1, R, ROWS)
        q_lo = load_rows(q, in_segment * q_s + head * q_h, live, HALF, HALF)
        q_hi = load_rows(q + HALF, in_segment * q_s + head * q_h, live, HALF, HALF)
        do_lo = load_rows(dout, in_segment * o_s + head * o_h, live, HALF, HALF)
        do_hi = load_rows(dout + HALF, in_segment * o_s + head * o_h, live, HALF, HALF)
        row_lse, row_delta, row_gate = _statistics_of(statistics, rows, in_segment, head, live, G, R)
        s = tl.dot(q_lo, tl.trans(k_lo), input_precision=PRECISION)
        s = tl.dot(q_hi, tl.trans(k_hi), s, input_precision=PRECISION)
        dp = tl.dot(do_lo, tl.trans(v_lo), input_precision=PRECISION)
        dp = tl.dot(do_hi, tl.trans(v_hi), dp, input_precision=PRECISION)
        p = tl.exp2(s * scale - row_lse[:, None])
        if tile < masked_tiles:
            again = pairs_of_tile(pairs, tile, start, count, 0, R, ROWS) // N  # rare, so not carried in registers
            p = _without_later_keys(p, first_token + again, block, sub, L_SEL, BN)
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
            store_rows(part_dq, row * D, dq_lo, pair >= 0, HALF, HALF)
            dq_hi = tl.dot(ds, k_hi, input_precision=PRECISION)
            store_rows(part_dq + HALF, row * D, dq_hi, pair >= 0, HALF, HALF)
    row = (item.to(tl.int64) * SUB + sub) * BN + tl.arange(0, BN)
    every_key = tl.full((BN,), True, tl.int1)
    store_rows(part_dk, row * D, tl.trans(dk_lo), every_key, HALF, HALF)
    store_rows(part_dk + HALF, row * D, tl.trans(dk_hi), every_key, HALF, HALF)
    store_rows(part_dv, row * D, tl.trans(dv_lo), every_key, HALF, HALF)
    store_rows(part_dv + HALF, row * D, tl.trans(dv_hi), every_key, HALF, HALF)


@triton.jit
def add_key_gradients(
    dk_acc, dv_acc, in_block, block, group, sequence, begun, last, dk_sum, dv_sum, dk, dv, tokens, scale,
    G: tl.constexpr, L_SEL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add a block's gradients onto what earlier chunks gave, if they have `begun` the sequence; round with the last."""
    key = block * L_SEL + in_block
    live = (in_block < L_SEL) & (key < tokens)
    target = ((sequence * tokens + key) * G + group) * D
    dk_acc += load_rows(dk_sum, target, live & begun, D, BD).to(tl.float32)
    dv_acc += load_rows(dv_sum, target, live & begun, D, BD).to(tl.float32)
    store_rows(dk_sum, target, dk_acc, live & (not last), D, BD)
    store_rows(dv_sum, target, dv_acc, live & (not last), D, BD)
    store_rows(dk, target, dk_acc * scale, live & last, D, BD)
    store_rows(dv, target, dv_acc, live & last, D, BD)
