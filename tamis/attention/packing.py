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
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.attention.spec import NSASpec, as_numbers

ALIGNED = 32  # numbers: every table begins where a kernel may read 16 bytes at once
KEYS_OF_TILE = 64  # compressed blocks whose gradients are made together


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
    offsets, block = _read_offsets(cu_seqlens, tokens), 0
    for begin, end in pairwise(offsets):
        blocks = spec.compressed_blocks(end - begin)
        if end > begin:
            yield slice(begin, end), slice(block, block + blocks)
        block += blocks


def check_offsets(cu_seqlens: object) -> None:
    """A tensor of offsets, whatever the queries."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens must be an int32 tensor or a PackedRow, got a {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape [documents + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}")


def _read_offsets(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The offsets, read by the host and checked."""
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != tokens or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens must begin with 0, never decrease and end with {tokens} tokens, got {offsets}")
    return offsets


def _first_blocks(cu_seqlens: Tensor, spec: NSASpec) -> Tensor:
    """`[documents + 1]` int64: the first compressed block of each document, and how many there are."""
    length = cu_seqlens.long().diff()
    blocks = ((length - spec.l).div(spec.d, rounding_mode="floor") + 1).clamp_min(0)
    return torch.nn.functional.pad(blocks.cumsum(0), (1, 0))


class PackedRow(NamedTuple):
    """A packed row as the kernels read it. Build it once per batch and share it by the layers."""

    cu_seqlens: Tensor
    tokens: int
    flat: Tensor  # int32: the tables of `PackedTables`, one after the other

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int, spec: NSASpec) -> PackedRow:
        return cls(cu_seqlens, tokens, packed_tables(cu_seqlens, tokens, as_numbers(spec)))

    def positions(self) -> Tensor:
        """`[S]` int64: the position of each token in its document."""
        return torch.arange(self.tokens, device=self.flat.device) - self._first_tokens()

    def layout(self, spec: NSASpec) -> CompressedLayout:
        """The same as `compressed_layout`, from the tables."""
        slots, at = spec.compressed_blocks(self.tokens), _aligned(4 * self.tokens)
        last_token = self.flat[at : at + 2 * slots : 2].long()
        exists = last_token < self.tokens
        first_token = (last_token - spec.l + 1).where(exists, 0)
        return CompressedLayout(exists, first_token, (last_token - self._first_tokens()[first_token]).where(exists, 0))

    def pieces(self, spec: NSASpec) -> PieceLayout:
        """Where φ finds the pieces of d tokens that blocks are made of, and where their gradients go."""
        token, first = torch.arange(self.tokens, device=self.flat.device), self._first_tokens()
        begin = token - (token - first) % spec.d  # of the piece that a token is in
        exists = begin + spec.d <= self.flat[1 : 4 * self.tokens : 4]
        slot_of_token = (begin // spec.d * spec.d + token - begin).where(exists, -1)

        cell = torch.arange(self.tokens // spec.d, device=self.flat.device) * spec.d
        document = self.flat[: 4 * self.tokens].view(-1, 4)[cell + spec.d - 1]
        begin = cell + document[:, 0] % spec.d
        token_of_slot = (begin[:, None] + token[: spec.d]).flatten().clamp_max(self.tokens - 1)
        begin, document = (x[: spec.compressed_blocks(self.tokens)] for x in (begin, document))
        block = document[:, 3] + (begin - document[:, 0]) // spec.d
        slot_of_block = self.layout(spec).first_token // spec.d
        return PieceLayout(
            token_of_slot, slot_of_token, slot_of_block, block.where(begin + spec.l <= document[:, 1], -1)
        )

    def _first_tokens(self) -> Tensor:
        return self.flat[: 4 * self.tokens : 4]


class PieceLayout(NamedTuple):
    """Where the pieces of a packed row lie: those of d tokens that begin at a multiple of d from a document's first.

    The piece whose first token is t has slot t // d: each slot is taken once, and a document's pieces are adjacent.
    Slots without a piece hold any tokens, and no block reads them.
    """

    token_of_slot: Tensor  # int64 [(S // d) · d]: pieces token by token
    slot_of_token: Tensor  # int64 [S]: its inverse, −1 for tokens of no whole piece
    piece_of_block: Tensor  # int64 [Nc]: slot of the first piece of each compressed block
    block_of_piece: Tensor  # int64 [Nc]: its inverse, −1 for pieces that begin no block


def as_row(cu_seqlens: Tensor | PackedRow | None, tokens: int, spec: NSASpec) -> PackedRow | None:
    """The packed row of offsets, unless it is made already, or there are none."""
    if cu_seqlens is None or isinstance(cu_seqlens, PackedRow):
        return cu_seqlens
    check_offsets(cu_seqlens)
    return PackedRow.of(cu_seqlens, tokens, spec)


@dataclass(frozen=True)
class PackedTables:
    """Parts of `PackedRow.flat`: int32 tables, row by row."""

    token: Tensor  # [S,4]: of a token's document the first token, the end, the first selection and compressed block
    compressed: Tensor  # [Nc,2]: last token of each compressed block, and the end of its document; S, S where unused
    tile: Tensor  # [K,2]: first compressed block of a tile, of one document, and the end of that document's
    block: Tensor  # [J,2]: first token of each selection block, and the end of its document; S, S where unused
    blocks: int  # J, room for the selection blocks of all documents
    documents: int
    longest: int  # no document has more tokens

    @classmethod
    def of(cls, flat: Tensor, documents: int, tokens: int, longest: int, spec: NSASpec) -> PackedTables:
        token, compressed, tile, block = flat.split(table_sizes(documents, tokens, spec))
        return cls(token, compressed, tile, block, block_slots(documents, tokens, spec), documents, longest)


def ids_in_documents(ids: Tensor, tables: PackedTables) -> Tensor:
    """Ids counted from the row's first block, as ids counted from the first block of each token's document."""
    return (ids - _first_block(tables, ids)).where(ids >= 0, -1)


def ids_in_row(ids: Tensor, tables: PackedTables | None) -> Tensor:
    """The inverse of `ids_in_documents`; a copy, because an operation may not return its input."""
    return ids.clone() if tables is None else (ids + _first_block(tables, ids)).where(ids >= 0, -1)


def _first_block(tables: PackedTables, ids: Tensor) -> Tensor:
    """The first selection block of each token's document, as ids are laid out."""
    return tables.token[2 : 4 * ids.shape[1] : 4, None, None]


def block_slots(documents: int, tokens: int, spec: NSASpec) -> int:
    """A bound on the selection blocks of so many documents: each may end with a partial one."""
    return tokens // spec.l_sel + documents


def table_sizes(documents: int, tokens: int, spec: NSASpec) -> list[int]:
    """Numbers in each table of `PackedTables`, with the padding that follows it."""
    compressed = spec.compressed_blocks(tokens)
    tiles = (
        compressed // KEYS_OF_TILE + min(documents, tokens // spec.l) + 1
    )  # each document may end with a partial one
    rows = (4 * tokens, 2 * compressed, 2 * tiles, 2 * block_slots(documents, tokens, spec))
    return [_aligned(n) for n in rows]


def _aligned(numbers: int) -> int:
    return numbers + -numbers % ALIGNED


@torch.library.custom_op("tamis::packed_tables", mutates_args=())
def packed_tables(cu_seqlens: Tensor, tokens: int, spec: list[int]) -> Tensor:
    """The tables of `PackedTables` in one tensor: by two kernels on a GPU, else by `reference_tables`."""
    sizes = table_sizes(len(cu_seqlens) - 1, tokens, NSASpec(*spec))
    if not cu_seqlens.is_cuda:
        _read_offsets(cu_seqlens, tokens)  # checked where no GPU has to be waited for
        parts = reference_tables(cu_seqlens, tokens, NSASpec(*spec))
        padded = [torch.nn.functional.pad(x.flatten(), (0, n - x.numel())) for x, n in zip(parts, sizes, strict=True)]
        return torch.cat(padded).to(torch.int32)
    from tamis.attention.kernels.tables import write_tables  # here, because a machine without a GPU may lack Triton

    flat = torch.empty(sum(sizes), dtype=torch.int32, device=cu_seqlens.device)
    write_tables(cu_seqlens, tokens, NSASpec(*spec), *flat.split(sizes))
    return flat


@packed_tables.register_fake
def _(cu_seqlens: Tensor, tokens: int, spec: list[int]) -> Tensor:
    sizes = table_sizes(len(cu_seqlens) - 1, tokens, NSASpec(*spec))
    return cu_seqlens.new_empty(sum(sizes), dtype=torch.int32)


def reference_tables(cu_seqlens: Tensor, tokens: int, spec: NSASpec) -> tuple[Tensor, ...]:
    """The tables `token`, `compressed`, `tile` and `block` of `PackedTables`, as int64."""
    offsets, device, last = cu_seqlens.long(), cu_seqlens.device, len(cu_seqlens) - 2
    document = document_of_tokens(cu_seqlens, tokens)
    first_selected = torch.nn.functional.pad((-(-offsets.diff() // spec.l_sel)).cumsum(0), (1, 0))
    first_compressed = _first_blocks(cu_seqlens, spec)
    begin, end = offsets[document], offsets[document + 1]

    layout = compressed_layout(cu_seqlens, tokens, spec)
    last_token = (layout.first_token + spec.l - 1).where(layout.exists, tokens)
    compressed_end = end[layout.first_token].where(layout.exists, tokens)

    keys, used = spec.compressed_blocks(tokens), first_compressed[-1]
    first_tile = torch.nn.functional.pad((-(-first_compressed.diff() // KEYS_OF_TILE)).cumsum(0), (1, 0))
    slot = torch.arange(table_sizes(last + 1, tokens, spec)[2] // 2, device=device)
    owner = torch.searchsorted(first_tile[1:], slot, right=True)
    exists, owner = owner <= last, owner.clamp_max(last)
    # The tiles after those of all documents hold the unused blocks, whose gradients are 0.
    first_key = torch.where(exists, first_compressed[owner], used) + KEYS_OF_TILE * (
        slot - torch.where(exists, first_tile[owner], first_tile[-1])
    )
    key_end = first_compressed[owner + 1].where(exists, keys)

    slot = torch.arange(block_slots(last + 1, tokens, spec), device=device)
    owner = torch.searchsorted(first_selected[1:], slot, right=True)
    exists, owner = owner <= last, owner.clamp_max(last)
    block_begin = (offsets[owner] + (slot - first_selected[owner]) * spec.l_sel).where(exists, tokens)
    return (
        torch.stack((begin, end, first_selected[document], first_compressed[document]), 1),
        torch.stack((last_token, compressed_end), 1),
        torch.stack((first_key, key_end), 1),
        torch.stack((block_begin, offsets[owner + 1].where(exists, tokens)), 1),
    )
