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
from tamis.attention.spec import NSASpec

BLOCK = 1024  # entries per program, and documents counted at once


def write_tables(
    cu_seqlens: Tensor, tokens: int, spec: NSASpec, token: Tensor, compressed: Tensor, block: Tensor
) -> None:
    """Fill the three tables, each with its padding."""
    documents = len(cu_seqlens) - 1
    firsts = torch.empty(2, documents + 1, dtype=torch.int32, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.contiguous()
    _count_blocks[(1,)](cu_seqlens, firsts, documents, L=spec.l, STRIDE=spec.d, L_SEL=spec.l_sel, BLOCK=BLOCK)
    sizes = (tokens, compressed.numel() // 2, block.numel() // 2)
    _write_tables[(sum(cdiv(n, BLOCK) for n in sizes),)](
        cu_seqlens, firsts, token, compressed, block, documents, *sizes, documents.bit_length(),
        L=spec.l, STRIDE=spec.d, L_SEL=spec.l_sel, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["documents"])
def _count_blocks(
    cu_seqlens, firsts, documents, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, BLOCK: tl.constexpr
):
    """First selection block and first compressed block of every document, and the end of the last one's."""
    selected = 0
    compressed = 0
    for first in range(0, documents, BLOCK):
        document = first + tl.arange(0, BLOCK)
        exists = document < documents
        begin = tl.load(cu_seqlens + document, mask=exists, other=0)
        length = tl.load(cu_seqlens + document + 1, mask=exists, other=0) - begin
        wanted = tl.cdiv(length, L_SEL)
        ended = tl.where(length >= L, (length - L) // STRIDE + 1, 0)
        tl.store(firsts + document, selected + tl.cumsum(wanted, 0) - wanted, mask=exists)
        tl.store(firsts + documents + 1 + document, compressed + tl.cumsum(ended, 0) - ended, mask=exists)
        selected += tl.sum(wanted, 0)
        compressed += tl.sum(ended, 0)
    tl.store(firsts + documents, selected)
    tl.store(firsts + 2 * documents + 1, compressed)


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


@triton.jit(do_not_specialize=["documents", "tokens", "slots", "blocks", "steps"])
def _write_tables(
    cu_seqlens, firsts, token_table, compressed_table, block_table, documents, tokens, slots, blocks, steps,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    for_tokens, for_slots = tl.cdiv(tokens, BLOCK), tl.cdiv(slots, BLOCK)
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
    else:
        index = (program - for_tokens - for_slots) * BLOCK + entry
        document = _document_of(firsts, index, documents, steps)
        exists = index < tl.load(firsts + documents)
        begin = tl.load(cu_seqlens + document) + (index - tl.load(firsts + document)) * L_SEL
        end = tl.load(cu_seqlens + document + 1)
        tl.store(block_table + index * 2, tl.where(exists, begin, tokens), mask=index < blocks)
        tl.store(block_table + index * 2 + 1, tl.where(exists, end, tokens), mask=index < blocks)
