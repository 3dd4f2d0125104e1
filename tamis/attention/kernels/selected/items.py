"""Triton: what the kernels of the selected branch that walk items have in common; see `lists.py`."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tamis.attention.kernels.selected.union import load_at, store_at


@triton.jit
def locate_item(item, item_list, item_start, first_segment, per_sequence, segment, blocks, table, G: tl.constexpr):
    """An item's first pair and its list; then of that list: sequence, first token of the segment, group, block and
    (segment, group) index in the chunk."""
    start = tl.load(item_start + item)
    list_id = tl.load(item_list + item)
    segment_group = list_id // blocks
    index = first_segment + segment_group // G
    sequence = (index // per_sequence).to(tl.int64)
    first_token = (index % per_sequence) * segment
    block = list_id % blocks + first_block_of(table, first_token)
    return start, list_id, sequence, first_token, (segment_group % G).to(tl.int64), block, segment_group


@triton.jit
def first_block_of(table, first_token):
    """The block that the lists of a segment count from."""
    return 0 if table is None else tl.load(table + 4 * first_token + 2)


@triton.jit
def block_tokens(bounds, block, tokens, L_SEL: tl.constexpr):
    """First token of a block, and the end of its sequence or document."""
    begin, end = block * L_SEL, tokens
    if bounds is not None:
        begin, end = tl.load(bounds + 2 * block), tl.load(bounds + 2 * block + 1)
    return begin, end


@triton.jit
def keys_of_block(bounds, block, sub, tokens, L_SEL: tl.constexpr, BN: tl.constexpr):
    """Tile `sub` of a block's keys: each one's place in the block, its position, and whether it exists."""
    in_block = sub * BN + tl.arange(0, BN)
    begin, end = block_tokens(bounds, block, tokens, L_SEL)
    key = begin + in_block
    return in_block, key, (in_block < L_SEL) & (key < end)


@triton.jit
def masked_tiles_of(
    pairs, start, count, end, N: tl.constexpr, TOKENS: tl.constexpr, L_SEL: tl.constexpr, BN: tl.constexpr
):
    """How many tiles at the head of an item hold tokens that do not see the whole block. They lie in it, so there are
    fewer than it has keys, and tokens are ascending. All tiles where a block does not fill its key tiles."""
    if L_SEL % BN != 0:
        return tl.cdiv(count, TOKENS)
    entry = tl.arange(0, triton.next_power_of_2(L_SEL))
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
def add_key_gradients(
    dk_acc, dv_acc, in_block, begin, end, group, sequence, begun, last, dk_sum, dv_sum, dk, dv, keys_written, tokens,
    scale, G: tl.constexpr, L_SEL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add a block's gradients onto what earlier chunks gave, if they have `begun` the sequence; round with the last.

    The first `keys_written` keys of a sequence have gradients already, of the tokens that are in no list.
    """
    key = begin + in_block
    live = (in_block < L_SEL) & (key < end)
    target = ((sequence * tokens + key) * G + group) * D
    dk_acc += load_at(dk_sum, target, live & begun, D, BD).to(tl.float32)
    dv_acc += load_at(dv_sum, target, live & begun, D, BD).to(tl.float32)
    store_at(dk_sum, target, dk_acc, live & (not last), D, BD)
    store_at(dv_sum, target, dv_acc, live & (not last), D, BD)
    dk_acc *= scale
    if keys_written is not None:
        dk_acc += load_at(dk, target, live & last & (key < keys_written), D, BD).to(tl.float32)
        dv_acc += load_at(dv, target, live & last & (key < keys_written), D, BD).to(tl.float32)
    store_at(dk, target, dk_acc, live & last, D, BD)
    store_at(dv, target, dv_acc, live & last, D, BD)
