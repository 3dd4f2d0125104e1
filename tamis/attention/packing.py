"""Packed documents: one row holds several documents, and each attends as if it were alone.

`cu_seqlens`, int32 `[documents + 1]`, holds the offsets: document `i` is tokens `cu_seqlens[i] … cu_seqlens[i+1]−1` of
the row. Offsets begin with 0, never decrease and end with S. A document may be empty: repeat S at the end to pad the
offsets to a fixed size. Blocks count from a document's first token, and the blocks of all documents follow each other.

The sizes of everything here depend on shapes alone, and the host reads no value: a CUDA graph serves every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tamis.attention.spec import NSASpec

ALIGNED = 32  # numbers: every table begins where a kernel may read 16 bytes at once


@dataclass(frozen=True)
class CompressedLayout:
    """The compressed blocks of a packed row, `[Nc]` each, with `Nc = spec.compressed_blocks(S)` slots.

    A document of `n ≥ l` tokens has `(n − l)//d + 1` blocks, a shorter one has none. Documents never need more slots
    than one document that fills the row. Unused slots are at the end.
    """

    exists: Tensor  # bool
    first_token: Tensor  # int64: position in the row; 0 where unused
    last_position: Tensor  # int64: position of the last token in its document, to which the key is rotated


def compressed_layout(cu_seqlens: Tensor, tokens: int, spec: NSASpec) -> CompressedLayout:
    """Where the blocks lie that φ compresses: block `i` covers tokens `first_token[i] … first_token[i] + l − 1`."""
    first_block = _first_blocks(cu_seqlens, spec)
    slot = torch.arange(spec.compressed_blocks(tokens), device=cu_seqlens.device)
    exists = slot < first_block[-1]
    document = torch.searchsorted(first_block[1:], slot, right=True).clamp_max(len(cu_seqlens) - 2)
    index = slot - first_block[document]
    first_token = cu_seqlens.long()[document] + index * spec.d
    return CompressedLayout(exists, first_token.where(exists, 0), (index * spec.d + spec.l - 1).where(exists, 0))


def document_of_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[S]` int64: the document each token belongs to."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


def positions_in_documents(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[S]` int64: the position of each token in its document, for rotary embeddings."""
    first = cu_seqlens.long()[document_of_tokens(cu_seqlens, tokens)]
    return torch.arange(tokens, device=cu_seqlens.device) - first


def documents(cu_seqlens: Tensor, tokens: int, spec: NSASpec) -> Iterator[tuple[slice, slice]]:
    """Tokens and compressed blocks of every document that is not empty. The host reads the offsets, and checks them."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != tokens or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens must begin with 0, never decrease and end with {tokens} tokens, got {offsets}")
    block = 0
    for begin, end in pairwise(offsets):
        blocks = spec.compressed_blocks(end - begin)
        if end > begin:
            yield slice(begin, end), slice(block, block + blocks)
        block += blocks


def _first_blocks(cu_seqlens: Tensor, spec: NSASpec) -> Tensor:
    """`[documents + 1]` int64: the first compressed block of each document, and how many there are."""
    length = cu_seqlens.long().diff()
    blocks = ((length - spec.l).div(spec.d, rounding_mode="floor") + 1).clamp_min(0)
    return torch.nn.functional.pad(blocks.cumsum(0), (1, 0))


@dataclass(frozen=True)
class PackedRow:
    """A packed row as the kernels read it: int32 tables on the device. Build it once per batch and share it by layers.

    Keys that a token sees, and tokens that see a key, are ranges; both ends of a range never decrease along the row.
    """

    cu_seqlens: Tensor
    tokens: int
    flat: Tensor  # all tables, one after the other, so that an operation takes one tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int, spec: NSASpec) -> PackedRow:
        tables = _tables(cu_seqlens, tokens, spec)
        flat = [torch.nn.functional.pad(x.flatten(), (0, -x.numel() % ALIGNED)) for x in tables]
        return cls(cu_seqlens, tokens, torch.cat(flat).to(torch.int32))


@dataclass(frozen=True)
class PackedTables:
    """Views of `PackedRow.flat`. A range `[…,2]` holds its first element and the one after its last."""

    token: Tensor  # [S,4]: the token's document, that document's first token and first selection block, and 0
    document: Tensor  # [documents + 1, 2]: first token and first compressed block
    block: Tensor  # [J,2]: tokens of each selection block, all documents' blocks in order; empty for unused ones
    window_keys: Tensor  # [S,2]: keys that each token sees
    window_rows: Tensor  # [S,2]: tokens that see each key
    compressed_keys: Tensor  # [S,2]
    compressed_rows: Tensor  # [Nc,2]
    longest: int  # no document has more tokens

    @classmethod
    def of(cls, flat: Tensor, documents: int, tokens: int, longest: int, spec: NSASpec) -> PackedTables:
        blocks, slots = block_slots(documents, tokens, spec), spec.compressed_blocks(tokens)
        shapes = ((tokens, 4), (documents + 1, 2), (blocks, 2), *[(tokens, 2)] * 3, (slots, 2))
        views, at = [], 0
        for rows, columns in shapes:
            views.append(flat[at : at + rows * columns].view(rows, columns))
            at += rows * columns + -(rows * columns) % ALIGNED
        token, document, block, window_keys, window_rows, compressed_keys, compressed_rows = views
        return cls(token, document, block, window_keys, window_rows, compressed_keys, compressed_rows, longest)


def block_slots(documents: int, tokens: int, spec: NSASpec) -> int:
    """A bound on the selection blocks of so many documents: each may end with a partial one."""
    return tokens // spec.l_sel + documents


def _tables(cu_seqlens: Tensor, tokens: int, spec: NSASpec) -> tuple[Tensor, ...]:
    """The tables of `PackedTables`, in its order."""
    offsets, device = cu_seqlens.long(), cu_seqlens.device
    token, document = torch.arange(tokens, device=device), document_of_tokens(cu_seqlens, tokens)
    begin, end = offsets[document], offsets[document + 1]
    first_compressed, last = _first_blocks(cu_seqlens, spec), len(cu_seqlens) - 2
    first_selected = torch.nn.functional.pad((-(-offsets.diff() // spec.l_sel)).cumsum(0), (1, 0))

    slot = torch.arange(block_slots(last + 1, tokens, spec), device=device)
    owner = torch.searchsorted(first_selected[1:], slot, right=True)
    exists, owner = owner <= last, owner.clamp_max(last)
    block_begin = (offsets[owner] + (slot - first_selected[owner]) * spec.l_sel).where(exists, tokens)
    block_end = torch.minimum(block_begin + spec.l_sel, offsets[owner + 1].where(exists, tokens))

    ended = ((token - begin + 1 - spec.l).div(spec.d, rounding_mode="floor") + 1).clamp_min(0)
    layout = compressed_layout(cu_seqlens, tokens, spec)
    row_begin = (layout.first_token + spec.l - 1).where(layout.exists, tokens)
    row_end = end[layout.first_token].where(layout.exists, tokens)
    compressed_begin = first_compressed[document]
    return (
        torch.stack((document, begin, first_selected[document], torch.zeros_like(token)), 1),
        torch.stack((offsets, first_compressed), 1),
        torch.stack((block_begin, block_end), 1),
        torch.stack((torch.maximum(token - spec.w + 1, begin), token + 1), 1),
        torch.stack((token, torch.minimum(token + spec.w, end)), 1),
        torch.stack((compressed_begin, compressed_begin + ended), 1),
        torch.stack((row_begin, row_end), 1),
    )
