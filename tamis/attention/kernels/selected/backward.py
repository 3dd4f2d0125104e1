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

from tamis.attention.kernels.launch import LOG2E
from tamis.attention.kernels.row_statistics import gather_statistics
from tamis.attention.kernels.selected.items import item_arguments, merge_launch, rows_of_merge, sizes_of
from tamis.attention.kernels.selected.lists import ITEM, LARGE, Layout, chunks_of_pairs
from tamis.attention.kernels.selected.rows import launch_settings, load_rows, store_rows, takes_halves
from tamis.attention.kernels.selected.sweep import add_key_gradients, backward_halves, backward_items
from tamis.attention.spec import NSASpec

# Chunks of a large call; memory is short here, with the outputs of all branches and all gradients about. Sequences that
# need not be cut leave room for larger chunks: they have no sums in float32, and fewer lists.
CHUNKS = 5
CHUNKS_OF_WHOLE_SEQUENCES = 4
AT_HAND = 8 << 20  # bytes of a group's queries and output gradients in a segment


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
    halves: bool | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values; that of the queries goes to `dq`. `gates` are this branch's alone.

    `halves` forces one of the two kernels, or the other; `segment` the tokens of a segment, for the halves alone: only
    there no item adds its gradients itself, which two segments of a sequence must not do at once.
    """
    batch, tokens, heads, dim = q_BSHD.shape
    heads_per_group = heads // ids_BSGn.shape[2]
    halves = takes_halves(q_BSHD, heads_per_group) if halves is None else halves
    assert halves or segment is None
    whole = tokens * CHUNKS_OF_WHOLE_SEQUENCES <= max(LARGE, batch * tokens)
    if halves and whole and segment is None:
        segment = segment_at_hand(q_BSHD, heads_per_group, spec)
    chunks = CHUNKS_OF_WHOLE_SEQUENCES if whole else CHUNKS
    layout = Layout.of(ids_BSGn, spec, chunks, chunk, segment=segment)
    sizes = sizes_of(q_BSHD, layout, spec)
    parts, groups = sizes["SUB"], layout.groups
    settings = launch_settings("halves" if halves else "backward", q_BSHD, sizes["R"])
    device = q_BSHD.device
    dk = torch.empty((batch, tokens, groups, dim), dtype=k_BSGD.dtype, device=device)
    dv = torch.empty_like(dk)
    # A sequence of several chunks adds up its gradients in float32 and rounds once, with the last of them.
    several = layout.segments_per_chunk < layout.segments_per_sequence
    dk_sum = torch.empty(dk.shape, dtype=torch.float32, device=device) if several else dk
    dv_sum = torch.empty_like(dk_sum) if several else dv
    part_dq = torch.empty((layout.pairs_per_chunk * parts * sizes["R"], dim), dtype=q_BSHD.dtype, device=device)
    part_dkv = torch.empty((2, layout.items_per_chunk, parts, sizes["BN"], dim), dtype=torch.float32, device=device)
    merge_grid, merge_sizes = merge_launch(layout, sizes)
    scale = dim**-0.5
    inputs = q_BSHD, k_BSGD, v_BSGD, dout_BSHD, gather_statistics(lse_BHS, delta_BHS, gates_BSH), lse_BHS.numel()
    strides = [stride for x in (q_BSHD, k_BSGD, v_BSGD, dout_BSHD) for stride in x.stride()[:3]]
    parts_of_sums = part_dq, part_dkv[0], part_dkv[1]
    for lists in chunks_of_pairs(ids_BSGn, layout):
        grid, work = (layout.items_per_chunk, parts), item_arguments(lists, layout)
        if halves:
            backward_halves[grid](*inputs, *parts_of_sums, *work, scale * LOG2E, *strides, **sizes, **settings)
        else:
            backward_items[grid](
                *inputs, *parts_of_sums, dk_sum, dv_sum, dk, dv, lists.list_items, *work, scale * LOG2E, scale,
                *strides, **sizes, **settings,
            )  # fmt: skip
        _merge_query_gradients[merge_grid](
            part_dq, ids_BSGn, dq_BSHD, lists.first_segment, layout.segments_per_sequence, layout.segment, tokens,
            layout.segments, scale, *ids_BSGn.stride()[:3], *dq_BSHD.stride()[:3],
            BS=triton.next_power_of_2(sizes["N"]), ADD=accumulate_dq, **merge_sizes,
        )  # fmt: skip
        _merge_key_gradients[(layout.sequences_per_chunk * groups * layout.blocks, parts * sizes["BN"] // 16)](
            part_dkv[0], part_dkv[1], lists.list_first, lists.list_items, dk_sum, dv_sum, dk, dv, lists.first_segment,
            layout.segments_per_chunk, layout.segments_per_sequence, layout.segments, layout.blocks, tokens, scale,
            G=sizes["G"], SUB=parts, L_SEL=spec.l_sel, BN=sizes["BN"], D=dim, BD=sizes["BD"], KEYS=16, ALL=halves,
        )  # fmt: skip
    return dk, dv


def segment_at_hand(q_BSHD: Tensor, heads_per_group: int, spec: NSASpec) -> int:
    """Tokens of a segment: few, so that what is read for each of their slots stays in L2, but lists must fill items."""
    _, tokens, _, dim = q_BSHD.shape
    bytes_per_token = 2 * heads_per_group * dim * q_BSHD.element_size()
    return max(AT_HAND // bytes_per_token, ITEM * spec.selection_blocks(tokens) // spec.n_sel)


@triton.jit(do_not_specialize=["first_segment", "per_sequence", "segments"])
def _merge_query_gradients(
    part_dq, ids, dq, first_segment, per_sequence, segment, tokens, segments, scale, i_b, i_s, i_g, dq_b, dq_s, dq_h,
    G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    live, sequence, token, head, local_token, choices = rows_of_merge(
        ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g, G, R, ROWS
    )
    slot = tl.arange(0, BS)
    chosen = tl.load(choices[:, None] + slot[None, :], mask=live[:, None] & (slot < N)[None, :], other=-1)
    used = tl.sum((chosen >= 0).to(tl.int32), 1)
    first_part = local_token * (N * SUB) * R + head % R
    acc = tl.zeros((ROWS, BD), tl.float32)
    for index in tl.range(0, N * SUB, loop_unroll_factor=8):
        acc += load_rows(part_dq, (first_part + index * R) * D, index < used * SUB, D, BD).to(tl.float32)
    acc = acc * scale
    target = sequence * dq_b + token * dq_s + head * dq_h
    if ADD:
        acc += load_rows(dq, target, live, D, BD).to(tl.float32)
    store_rows(dq, target, acc, live, D, BD)


@triton.jit(do_not_specialize=["first_segment", "per_chunk", "per_sequence", "segments"])
def _merge_key_gradients(
    part_dk, part_dv, list_first, list_items, dk_sum, dv_sum, dk, dv,
    first_segment, per_chunk, per_sequence, segments, blocks, tokens, scale,
    G: tl.constexpr, SUB: tl.constexpr, L_SEL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Add up the items of a block's lists, one to a segment; but for ALL, lists of one item are finished already."""
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks % G
    sequence = first_segment // per_sequence + tl.program_id(0) // (blocks * G)
    first = tl.maximum(first_segment, sequence * per_sequence)
    end = tl.minimum(tl.minimum(first_segment + per_chunk, segments), (sequence + 1) * per_sequence)
    if first >= end:
        return
    first_list = ((first - first_segment) * G + group) * blocks + block
    if (not ALL) & (tl.load(list_items + first_list) == 1):
        return
    in_block = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    always = tl.full((KEYS,), True, tl.int1)
    dk_acc = tl.zeros((KEYS, BD), tl.float32)
    dv_acc = tl.zeros((KEYS, BD), tl.float32)
    for segment in range(end - first):
        list_id = first_list + segment * (G * blocks)
        first_item = tl.load(list_first + list_id).to(tl.int64)
        for item in tl.range(0, tl.load(list_items + list_id), loop_unroll_factor=4):
            row = (first_item + item) * (SUB * BN) + in_block
            dk_acc += load_rows(part_dk, row * D, always, D, BD)
            dv_acc += load_rows(part_dv, row * D, always, D, BD)
    begun, last = first > sequence * per_sequence, end == (sequence + 1) * per_sequence
    add_key_gradients(
        dk_acc, dv_acc, in_block, block, group, sequence.to(tl.int64), begun, last, dk_sum, dv_sum, dk, dv,
        tokens, scale, G, L_SEL, D, BD,
    )  # fmt: skip
