"""Triton: the tables of a packed row (`packing.PackedTables`) in two launches; `packing.reference_tables` defines them.

The first kernel, one program, counts the blocks before every document. The second looks up the document of each token,
compressed block and selection block by bisection.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import cdiv
from tamis.attention.packing import KEYS_OF_TILE
from tamis.attention.spec import NSASpec

BLOCK = 1024  # entries per program, and documents counted at once


def write_tables(
    cu_seqlens: Tensor, tokens: int, spec: NSASpec, token: Tensor, compressed: Tensor, tile: Tensor, block: Tensor
) -> None:
    """Fill the tables, each with its padding."""
    documents = len(cu_seqlens) - 1
    firsts = torch.empty(3, documents + 1, dtype=torch.int32, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.contiguous()
    constants = {"L": spec.l, "STRIDE": spec.d, "L_SEL": spec.l_sel, "KEYS": KEYS_OF_TILE, "BLOCK": BLOCK}
    _count_blocks[(1,)](cu_seqlens, firsts, documents, **constants)
    sizes = (tokens, compressed.numel() // 2, tile.numel() // 2, block.numel() // 2)
    _write_tables[(sum(cdiv(n, BLOCK) for n in sizes),)](
        cu_seqlens, firsts, token, compressed, tile, block, documents, *sizes, spec.compressed_blocks(tokens),
        documents.bit_length(), **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["documents"])
def _count_blocks(
    cu_seqlens, firsts, documents,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First selection block, compressed block and tile of every document, and the end of the last one's."""
    selected = 0
    compressed = 0
    tiles = 0
    for first in range(0, documents, BLOCK):
        document = first + tl.arange(0, BLOCK)
        exists = document < documents
        begin = tl.load(cu_seqlens + document, mask=exists, other=0)
        length = tl.load(cu_seqlens + document + 1, mask=exists, other=0) - begin
        wanted = tl.cdiv(length, L_SEL)
        ended = tl.where(length >= L, (length - L) // STRIDE + 1, 0)
        tl.store(firsts + document, selected + tl.cumsum(wanted, 0) - wanted, mask=exists)
        tl.store(firsts + documents + 1 + document, compressed + tl.cumsum(ended, 0) - ended, mask=exists)
        filled = tl.cdiv(ended, KEYS)
        tl.store(firsts + 2 * (documents + 1) + document, tiles + tl.cumsum(filled, 0) - filled, mask=exists)
        selected += tl.sum(wanted, 0)
        compressed += tl.sum(ended, 0)
        tiles += tl.sum(filled, 0)
    tl.store(firsts + documents, selected)
    tl.store(firsts + 2 * documents + 1, compressed)
    tl.store(firsts + 3 * documents + 2, tiles)


@triton.jit
def _document_of(starts, index, documents, steps):
    """The last document that starts at or before each index: empty ones before it start there too."""
    low = index * 0
    high = low + documents  # the answer lies in low … high − 1
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["documents", "tokens", "slots", "tiles", "blocks", "keys", "steps"])
def _write_tables(
    cu_seqlens, firsts, token_table, compressed_table, tile_table, block_table,
    documents, tokens, slots, tiles, blocks, keys, steps,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    for_tokens, for_slots, for_tiles = tl.cdiv(tokens, BLOCK), tl.cdiv(slots, BLOCK), tl.cdiv(tiles, BLOCK)
    entry = tl.arange(0, BLOCK)
    if program < for_tokens:
        index = program * BLOCK + entry
        document = _document_of(cu_seqlens, index, documents, steps)
        inside, at = index < tokens, token_table + index * 4
        tl.store(at, tl.load(cu_seqlens + document), mask=inside)
        tl.store(at + 1, tl.load(cu_seqlens + document + 1), mask=inside)
        tl.store(at + 2, tl.load(firsts + document), mask=inside)
        tl.store(at + 3, tl.load(firsts + documents + 1 + document), mask=inside)
    elif program < for_tokens + for_slots:
        index = (program - for_tokens) * BLOCK + entry
        firsts += documents + 1
        document = _document_of(firsts, index, documents, steps)
        exists = index < tl.load(firsts + documents)
        last = tl.load(cu_seqlens + document) + (index - tl.load(firsts + document)) * STRIDE + L - 1
        end = tl.load(cu_seqlens + document + 1)
        tl.store(compressed_table + index * 2, tl.where(exists, last, tokens), mask=index < slots)
        tl.store(compressed_table + index * 2 + 1, tl.where(exists, end, tokens), mask=index < slots)
    elif program < for_tokens + for_slots + for_tiles:
        index = (program - for_tokens - for_slots) * BLOCK + entry
        first_keys, firsts = firsts + documents + 1, firsts + 2 * (documents + 1)
        document = _document_of(firsts, index, documents, steps)
        last = tl.load(firsts + documents)  # the tiles from here on hold the unused blocks
        document = tl.where(index < last, document, documents)
        first = tl.load(first_keys + document) + (index - tl.load(firsts + document)) * KEYS
        end = tl.load(first_keys + document + 1, mask=index < last, other=0)
        tl.store(tile_table + index * 2, first, mask=index < tiles)
        tl.store(tile_table + index * 2 + 1, tl.where(index < last, end, keys), mask=index < tiles)
    else:
        index = (program - for_tokens - for_slots - for_tiles) * BLOCK + entry
        document = _document_of(firsts, index, documents, steps)
        exists = index < tl.load(firsts + documents)
        begin = tl.load(cu_seqlens + document) + (index - tl.load(firsts + document)) * L_SEL
        end = tl.load(cu_seqlens + document + 1)
        tl.store(block_table + index * 2, tl.where(exists, begin, tokens), mask=index < blocks)
        tl.store(block_table + index * 2 + 1, tl.where(exists, end, tokens), mask=index < blocks)
