"""Which queries chose each block: the inverse of the selection, built on the device without asking the host.

A *pair* is one query token together with one of its chosen blocks. The backward pass, and the forward pass of long
sequences, hold a block's keys and values and walk the tokens that chose it, and so need the pairs sorted by
block. Tokens are ascending within a list: the order of summation is fixed, so the same inputs give the same bits.

Tokens are cut into segments (a whole sequence, or an equal part of a long one) and segments into chunks. Kernels work
chunk by chunk, because what they keep per pair would not fit for all tokens at once. There is one list per segment,
group and block. Lists differ widely in length (every token chooses block 0), so each is cut into *items* of at most
`Layout.item` tokens. A segment of a packed row has lists for the blocks of its documents alone, counted from the first
of them, and a list has room for the tokens of one document.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import PreparedKernel, cdiv
from tamis.attention.kernels.selected.layout import Layout
from tamis.attention.kernels.tape import empty, zeros
from tamis.attention.packing import PackedTables

MARK_BYTES = 256 << 20  # most memory for the marks while lists are built; longer inputs build them in several spans
CUTTERS = 16  # programs that cut a chunk's lists: the list of block 0 alone makes 64 items or more
FEW_WORDS = 8192  # of marks that one program sums, in one launch instead of two
WORDS_OF_TILE = 4096  # of marks, where several programs sum them


@dataclass(frozen=True)
class Chunk:
    """The lists of one chunk, cut into items. Lists are numbered within the chunk: (segment, group, block)."""

    first_segment: int
    pairs: Tensor  # int32: token_in_segment * slots + slot, list after list (shared by the chunks of a span)
    item_list: Tensor  # int32 [items]: the list an item belongs to
    item_start: Tensor  # int32 [items]: its first pair
    item_count: Tensor  # int32 [items]: its number of pairs, 0 for items that do not exist
    item_part: Tensor  # int32 [items]: where its gradients of keys go, if its list has several items
    list_first: Tensor  # int32 [lists]: where those of a list begin
    list_items: Tensor  # int32 [lists]: its number of items


def chunks_of_pairs(
    ids_BSGn: Tensor,
    layout: Layout,
    packed: PackedTables | None = None,
    every_part: bool = False,
    prefix: int = 0,
) -> Iterator[Chunk]:
    """All chunks in order. Lists of several chunks are built together as long as their marks stay small. With
    `every_part` a list of one item has a part too. The first `prefix` tokens of a sequence, or document, are in none.
    """
    ids_BSGn = ids_BSGn.contiguous()
    mark_bytes = layout.lists_per_chunk * layout.words * 3 * 4
    together = max(1, min(layout.chunks, MARK_BYTES // mark_bytes))
    for first_chunk in range(0, layout.chunks, together):
        chunks = min(together, layout.chunks - first_chunk)
        yield from _build_span(ids_BSGn, layout, packed, every_part, prefix, first_chunk, chunks)


def _build_span(
    ids_BSGn: Tensor,
    layout: Layout,
    packed: PackedTables | None,
    every_part: bool,
    prefix: int,
    first_chunk: int,
    chunks: int,
) -> Iterator[Chunk]:
    first_segment = first_chunk * layout.segments_per_chunk
    last_segment = min(layout.segments, first_segment + chunks * layout.segments_per_chunk)
    first_token, last_token = layout.first_token(first_segment), layout.first_token(last_segment)
    per_token = layout.groups * layout.slots
    lists = chunks * layout.lists_per_chunk
    device = ids_BSGn.device

    marks = zeros((lists * layout.words,), torch.int32, device)
    pairs = empty(((last_token - first_token) * per_token,), torch.int32, device)
    table = packed.token if packed else None
    geometry = (layout.tokens, layout.segment, layout.segments_per_sequence, layout.blocks, layout.words)
    grid = (cdiv(pairs.numel(), 1024),)
    bounds = (first_token * per_token, last_token * per_token, first_segment)
    constants = {"G": layout.groups, "N": layout.slots, "L_SEL": layout.l_sel, "PREFIX": prefix}
    _mark_pairs[grid](ids_BSGn, table, marks, *bounds, *geometry, **constants, BLOCK=1024)
    ends = _ends_of(marks)
    _place_pairs[grid](ids_BSGn, table, marks, ends, pairs, *bounds, *geometry, **constants, BLOCK=1024)

    items = zeros((4, chunks, layout.items_per_chunk), torch.int32, device)
    item_list, item_start, item_count, item_part = items
    list_first, list_items = empty((2, chunks, layout.lists_per_chunk), torch.int32, device)
    _cut_lists[(chunks, CUTTERS)](
        ends, item_list, item_start, item_count, item_part, list_first, list_items,
        layout.words, layout.lists_per_chunk, layout.items_per_chunk, ITEM=layout.item, EVERY_PART=every_part,
        CUTTERS=CUTTERS, BLOCK=1024,
    )  # fmt: skip
    del marks, ends  # not needed by the kernels that run between the chunks
    for c in range(chunks):
        yield Chunk(
            first_segment + c * layout.segments_per_chunk,
            pairs, item_list[c], item_start[c], item_count[c], item_part[c], list_first[c], list_items[c],
        )  # fmt: skip


@triton.jit
def _locate_pairs(
    ids, table, first, last, first_segment, tokens, segment, per_sequence, blocks, words, G, N, L_SEL, PREFIX, BLOCK
):  # fmt: skip
    """For a tile of pairs: which are listed; the word and bit of each among the marks, and what a list stores of it."""
    pair = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(ids + pair, mask=pair < last, other=-1)
    exists = block >= 0
    if table is None:
        exists = exists & (block < blocks)
    slot = (pair % N).to(tl.int32)
    group = (pair // N) % G
    token = pair // (N * G)
    sequence = token // tokens
    in_sequence = (token % tokens).to(tl.int32)
    in_segment = in_sequence % segment
    in_list = in_segment
    if table is None:
        if PREFIX > 0:
            exists = exists & (in_sequence >= PREFIX)
    else:  # lists count from the segment's first block, and their tokens from the block's first
        first_token = tl.load(table + 4 * in_sequence, mask=exists, other=0)
        if PREFIX > 0:
            exists = exists & (in_sequence - first_token >= PREFIX)
        first_block = tl.load(table + 4 * in_sequence + 2, mask=exists, other=0)
        begin = first_token + (block - first_block) * L_SEL - (in_sequence - in_segment)
        in_list = in_segment - tl.maximum(begin, 0)
        block -= tl.load(table + 4 * (in_sequence - in_segment) + 2, mask=exists, other=0)
        exists = exists & (block < blocks) & (in_list < words * 32)  # as long as no document exceeds max_seqlen
    list_id = ((sequence * per_sequence + in_sequence // segment - first_segment) * G + group) * blocks + block
    return exists, list_id * words + in_list // 32, in_list % 32, in_segment * N + slot


@triton.jit
def _count_bits(word):
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@PreparedKernel
@triton.jit(do_not_specialize=["first", "last", "first_segment"])
def _mark_pairs(
    ids, table, marks, first, last, first_segment, tokens, segment, per_sequence, blocks, words,
    G: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set one bit per pair. Integer atomics give the same result in any order."""
    exists, word, bit, _ = _locate_pairs(
        ids, table, first, last, first_segment, tokens, segment, per_sequence, blocks, words, G, N, L_SEL, PREFIX, BLOCK
    )  # fmt: skip
    one = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_or(marks + word, one << bit, mask=exists, sem="relaxed")


def _ends_of(marks: Tensor) -> Tensor:
    """How many pairs are marked in each word and all before it."""
    sums, words = empty(marks.shape, torch.int32, marks.device), marks.numel()
    if words <= FEW_WORDS:
        _sum_marks[(1,)](marks, sums, words, BLOCK=FEW_WORDS, num_warps=8)
        return sums
    tiles = cdiv(words, WORDS_OF_TILE)
    counts = empty((tiles,), torch.int32, marks.device)
    _count_tiles[(tiles,)](marks, counts, words, BLOCK=WORDS_OF_TILE, num_warps=8)
    _sum_tiles[(tiles,)](marks, counts, sums, words, BLOCK=WORDS_OF_TILE, TILES=1024, num_warps=8)
    return sums


@PreparedKernel
@triton.jit
def _sum_marks(marks, sums, words, BLOCK: tl.constexpr):
    word = tl.arange(0, BLOCK)
    counts = _count_bits(tl.load(marks + word, mask=word < words, other=0))
    tl.store(sums + word, tl.cumsum(counts, 0), mask=word < words)


@triton.jit
def _count_words(marks, words, BLOCK: tl.constexpr):
    """Which words a program's tile has, and the pairs that are marked in each."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return word, _count_bits(tl.load(marks + word, mask=word < words, other=0))


@PreparedKernel
@triton.jit(do_not_specialize=["words"])
def _count_tiles(marks, counts, words, BLOCK: tl.constexpr):
    _, in_words = _count_words(marks, words, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(in_words, 0))


@PreparedKernel
@triton.jit(do_not_specialize=["words"])
def _sum_tiles(marks, counts, sums, words, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Every program adds up the tiles before its own, so that nothing is launched in between for that."""
    before = tl.zeros((TILES,), tl.int32)
    for first in range(0, tl.program_id(0), TILES):
        tile = first + tl.arange(0, TILES)
        before += tl.load(counts + tile, mask=tile < tl.program_id(0), other=0)
    word, in_words = _count_words(marks, words, BLOCK)
    tl.store(sums + word, tl.sum(before, 0) + tl.cumsum(in_words, 0), mask=word < words)


@PreparedKernel
@triton.jit(do_not_specialize=["first", "last", "first_segment"])
def _place_pairs(
    ids, table, marks, ends, pairs, first, last, first_segment, tokens, segment, per_sequence, blocks,
    words, G: tl.constexpr, N: tl.constexpr, L_SEL: tl.constexpr, PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each pair to its place: behind all pairs of earlier words, and of earlier tokens in its own word."""
    exists, word, bit, stored = _locate_pairs(
        ids, table, first, last, first_segment, tokens, segment, per_sequence, blocks, words, G, N, L_SEL, PREFIX, BLOCK
    )  # fmt: skip
    mark = tl.load(marks + word, mask=exists, other=0)
    end = tl.load(ends + word, mask=exists, other=0)
    one = tl.full((BLOCK,), 1, tl.int32)
    earlier = _count_bits(mark & ((one << bit) - 1))
    tl.store(pairs + end - _count_bits(mark) + earlier, stored, mask=exists)


@PreparedKernel
@triton.jit
def _cut_lists(
    ends, item_list, item_start, item_count, item_part, list_first, list_items, words, lists, items,
    ITEM: tl.constexpr, EVERY_PART: tl.constexpr, CUTTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut the lists of one chunk into items of at most ITEM pairs, numbered in the order of the lists.

    Each of a chunk's programs counts all its items, and writes every CUTTERS-th of a list.
    """
    chunk = tl.program_id(0).to(tl.int64)
    item_list += chunk * items
    item_start += chunk * items
    item_count += chunk * items
    item_part += chunk * items
    used = 0
    used_parts = 0
    for first in range(0, lists, BLOCK):
        list_id = first + tl.arange(0, BLOCK)
        exists = list_id < lists
        last_word = (chunk * lists + list_id + 1) * words - 1
        end = tl.load(ends + last_word, mask=exists, other=0)
        start = tl.load(ends + last_word - words, mask=exists & (last_word >= words), other=0)
        start = tl.where(exists, start, end)
        wanted = (end - start + ITEM - 1) // ITEM
        first_item = used + tl.cumsum(wanted, 0) - wanted
        parts = wanted if EVERY_PART else tl.where(wanted > 1, wanted, 0)
        first_part = used_parts + tl.cumsum(parts, 0) - parts
        tl.store(list_first + chunk * lists + list_id, first_part, mask=exists)
        tl.store(list_items + chunk * lists + list_id, wanted, mask=exists)
        for part in range(tl.program_id(1), tl.max(wanted, 0), CUTTERS):
            real = part < wanted
            tl.store(item_list + first_item + part, list_id, mask=real)
            tl.store(item_start + first_item + part, start + part * ITEM, mask=real)
            tl.store(item_count + first_item + part, tl.minimum(end - start - part * ITEM, ITEM), mask=real)
            tl.store(item_part + first_item + part, first_part + part, mask=real)
        used += tl.sum(wanted, 0)
        used_parts += tl.sum(parts, 0)


def item_arguments(lists: Chunk, layout: Layout, packed: PackedTables | None) -> tuple:
    return (
        lists.pairs, lists.item_list, lists.item_start, lists.item_count, lists.first_segment,
        layout.segments_per_sequence, layout.segment, layout.blocks, layout.tokens,
        packed.token if packed else None, packed.block if packed else None,
    )  # fmt: skip
