"""Triton: joins what the items of the selected branch left behind: outputs, and gradients of keys.

The kernels are bound by memory. Sums have a fixed order: slots of a token, items of a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tamis.attention.kernels.gates import store_mixture
from tamis.attention.kernels.launch import PreparedKernel
from tamis.attention.kernels.selected.items import add_key_gradients, block_tokens, first_block_of
from tamis.attention.kernels.selected.union import load_at, store_at

TOGETHER = tl.constexpr(8)  # partial outputs of a token that are read at once


@triton.jit
def _rows_of_merge(
    ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where a tile of tokens × heads lies: rows that exist, sequence, token, query head, the
    token's number within the chunk and group, and where its choices lie."""
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
    choices = ids + sequence * i_b + group * i_g + token * i_s
    return live, sequence, token, group * R + row % R, segment_group * segment + in_segment, choices


@PreparedKernel
@triton.jit(do_not_specialize=["first_segment", "per_sequence", "segments"])
def merge_outputs(
    part_out, part_lse, ids, out, lse, mixed, gates, cmp, win, first_segment, per_sequence, segment, tokens, segments,
    i_b, i_s, i_g,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    ROWS: tl.constexpr, BEGUN: tl.constexpr,
):  # fmt: skip
    """Join the softmaxes of a token's blocks, weighted by their log-sum-exps (base 2). BEGUN: `out` and `lse` hold one
    over other blocks, which is joined with them. Then the branch is complete, and can be mixed with the others."""
    live, sequence, token, head, local_token, choices = _rows_of_merge(
        ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g, G, R, ROWS
    )
    # Slot by slot: a sum over a tile's second dimension comes in another layout, and every read that it masks would
    # wait for all warps.
    used = tl.zeros((ROWS,), tl.int32)
    for slot in tl.static_range(N):
        used += (tl.load(choices + slot, mask=live, other=-1) >= 0).to(tl.int32)
    out_row = (sequence * tokens + token) * (G * R) + head
    lse_row = (sequence * (G * R) + head) * tokens + token
    first_part = local_token * (N * SUB) * R + tl.arange(0, ROWS) % R
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite, so that nothing is taken from infinity
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BD), tl.float32)
    joined = live
    if BEGUN:
        joined = live & (used > 0)  # else there is nothing to join with
        if mixed is None:
            live = joined
            if tl.max(live.to(tl.int32), 0) == 0:
                return
        begun = tl.load(lse + lse_row, mask=live, other=-float("inf")) * 1.4426950408889634  # log2(e)
        top = tl.maximum(begun, top)
        total = tl.exp2(begun - top)
        acc = load_at(out, out_row * D, live, D, BD).to(tl.float32) * total[:, None]
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
    store_at(out, out_row * D, acc, joined, D, BD)
    natural = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + lse_row, natural, mask=joined)
    store_mixture(mixed, gates, cmp, win, acc, out_row, live, D, BD)


@PreparedKernel
@triton.jit(do_not_specialize=["first_segment", "per_chunk", "per_sequence", "segments"])
def merge_key_gradients(
    part_dk, part_dv, list_first, list_items, table, bounds, dk_sum, dv_sum, dk, dv, keys_written,
    first_segment, per_chunk, per_sequence, segments, segment, blocks, all_blocks, tokens, scale,
    G: tl.constexpr, SUB: tl.constexpr, L_SEL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Add up the items of a block's lists, one to a segment; unless ALL, lists of one item are finished already."""
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks % G
    sequence = first_segment // per_sequence + tl.program_id(0) // (blocks * G)
    first = tl.maximum(first_segment, sequence * per_sequence)
    end = tl.minimum(tl.minimum(first_segment + per_chunk, segments), (sequence + 1) * per_sequence)
    if first >= end:
        return
    first_list = ((first - first_segment) * G + group) * blocks + block
    first_token = (first - sequence * per_sequence) * segment
    end_token = tl.minimum((end - sequence * per_sequence) * segment, tokens)
    block += first_block_of(table, first_token)
    if block >= all_blocks:
        return
    block_begin, block_end = block_tokens(bounds, block, tokens, L_SEL)
    begun, last = block_begin < first_token, block_end <= end_token
    if block_begin >= end_token:  # a later chunk begins it
        return
    items = tl.load(list_items + first_list)
    if (not ALL) & ((items == 1) | ((items == 0) & begun & (not last))):
        return
    in_block = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    always = tl.full((KEYS,), True, tl.int1)
    dk_acc = tl.zeros((KEYS, BD), tl.float32)
    dv_acc = tl.zeros((KEYS, BD), tl.float32)
    for later in range(end - first):
        list_id = first_list + later * (G * blocks)
        first_item = tl.load(list_first + list_id).to(tl.int64)
        for item in tl.range(0, tl.load(list_items + list_id), loop_unroll_factor=4):
            row = (first_item + item) * (SUB * BN) + in_block
            dk_acc += load_at(part_dk, row * D, always, D, BD)
            dv_acc += load_at(part_dv, row * D, always, D, BD)
    add_key_gradients(
        dk_acc, dv_acc, in_block, block_begin, block_end, group, sequence.to(tl.int64), begun, last, dk_sum, dv_sum,
        dk, dv, keys_written, tokens, scale, G, L_SEL, D, BD,
    )  # fmt: skip
