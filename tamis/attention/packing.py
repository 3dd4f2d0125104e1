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
