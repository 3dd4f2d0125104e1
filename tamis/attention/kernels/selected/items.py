"""How the pairs form of the selected branch finds its work: sizes, and which rows and pairs belong to a tile."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import padded, precision
from tamis.attention.kernels.selected.lists import ITEM, Chunk, Layout
from tamis.attention.kernels.selected.rows import key_tiles
from tamis.attention.spec import NSASpec


def sizes_of(q_BSHD: Tensor, layout: Layout, spec: NSASpec) -> dict[str, Any]:
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


def item_arguments(lists: Chunk, layout: Layout) -> tuple:
    return (
        lists.pairs, lists.item_list, lists.item_start, lists.item_count, lists.first_segment,
        layout.segments_per_sequence, layout.segment, layout.blocks, layout.tokens,
    )  # fmt: skip


def merge_launch(layout: Layout, sizes: dict) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for the kernels that join a token's partial results, in tiles of tokens × heads."""
    rows = max(2048 // sizes["BD"], triton.next_power_of_2(sizes["R"]))
    grid = (triton.cdiv(layout.segment, rows // sizes["R"]) * layout.segments_per_chunk * layout.groups,)
    return grid, {name: sizes[name] for name in ("G", "R", "N", "SUB", "D", "BD")} | {"ROWS": rows}


@triton.jit
def place_of_item(item, item_list, item_start, first_segment, per_sequence, segment, blocks, G: tl.constexpr):
    """An item's first pair and its list; then of that list: sequence, first token of the segment, group, block and
    (segment, group) index in the chunk."""
    start = tl.load(item_start + item)
    list_id = tl.load(item_list + item)
    segment_group = list_id // blocks
    index = first_segment + segment_group // G
    sequence = (index // per_sequence).to(tl.int64)
    first_token = (index % per_sequence) * segment
    return start, list_id, sequence, first_token, (segment_group % G).to(tl.int64), list_id % blocks, segment_group


@triton.jit
def keys_of_block(block, sub, tokens, L_SEL: tl.constexpr, BN: tl.constexpr):
    """Tile `sub` of a block's keys: each one's place in the block, its position, and whether it exists."""
    in_block = sub * BN + tl.arange(0, BN)
    key = block * L_SEL + in_block
    return in_block, key, (in_block < L_SEL) & (key < tokens)


@triton.jit
def masked_tiles_of(
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
def rows_of_tile(tile, count, R: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a tile of tokens × heads exist."""
    row = tl.arange(0, ROWS)
    return (row < (ROWS // R) * R) & (tile * (ROWS // R) + row // R < count)


@triton.jit
def pairs_of_tile(pairs, tile, start, count, missing: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr):
    """The pair of every row of a tile of tokens × heads, `missing` where the row does not exist."""
    entry = tile * (ROWS // R) + tl.arange(0, ROWS) // R
    return tl.load(pairs + start + entry, mask=rows_of_tile(tile, count, R, ROWS), other=missing)


@triton.jit
def rows_of_merge(
    ids, first_segment, per_sequence, segment, tokens, segments, i_b, i_s, i_g,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where a tile of tokens × heads of the merge kernels lies: rows that exist, sequence, token, query head, the
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
