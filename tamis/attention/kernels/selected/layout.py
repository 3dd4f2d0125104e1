"""How the selected branch cuts its tokens into segments, chunks, lists and items; see `lists.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import block_tiles, cdiv, next_power_of_2, padded, precision
from tamis.attention.packing import PackedTables
from tamis.attention.spec import NSASpec

ITEM = 256  # tokens per item: enough to pay for loading the block, few enough to keep all processors busy to the end
LARGE = 65536  # tokens; smaller calls have fewer chunks, since short chunks leave short lists
MOST_CHUNKS = 4  # of a large call
CHUNK_BYTES = 1 << 30  # of partial results. Processors idle at the end of every chunk, so few large ones are faster
PACKED_CHUNK_BYTES = 1 << 29  # lists and sums of a packed row take memory too
SHORTEST = 64  # tokens of a list, on average, where segments are cut for the sake of the cache
WORD = 32  # tokens per word of marks
CACHED_BYTES = 8 << 20  # of a group's queries and output gradients in a segment, which should stay in L2


def aligned(count: int) -> int:
    """Room for numbers, where every chunk's begin at a multiple of 16 bytes: else a kernel is compiled twice."""
    return -(-count // 16) * 16


@dataclass(frozen=True)
class Layout:
    """How a call's tokens are cut into segments and chunks, and how many lists and items that makes."""

    batch: int
    tokens: int  # per sequence
    groups: int
    blocks: int  # selection blocks of a segment's lists, those of cached tokens before the first query included
    slots: int  # n_sel
    l_sel: int
    segment: int  # tokens per segment, a multiple of WORD unless it is the whole sequence
    segments_per_chunk: int
    longest: int  # tokens of a list
    item: int  # tokens of an item, at most

    @classmethod
    def of(
        cls,
        ids_BSGn: Tensor,
        spec: NSASpec,
        chunks: int,
        chunk: int | None = None,
        start: int = 0,
        segment: int | None = None,
        packed: PackedTables | None = None,
        item: int = ITEM,
    ) -> Layout:
        """At most about `chunks` chunks, or chunks of about `chunk` tokens; of segments of at most about `segment`, or
        longer ones where lists would be too short."""
        batch, tokens, groups, slots = ids_BSGn.shape
        blocks = spec.selection_blocks(packed.longest if packed else start + tokens)
        chunk = chunk or -(-max(LARGE, batch * tokens) // chunks)
        most = min(chunk, max(segment, SHORTEST * blocks // slots)) if segment else chunk
        parts = -(-tokens // most)
        segment = tokens if parts == 1 else -(-tokens // (parts * WORD)) * WORD
        per_sequence = -(-tokens // segment)
        segments_per_chunk = chunk // tokens * per_sequence or max(1, chunk // segment)  # whole sequences if they fit
        segments_per_chunk = min(segments_per_chunk, batch * per_sequence)
        longest = segment
        if packed:  # blocks from the first token of a document that reaches into the segment to the segment's end
            touched = (segment + packed.longest) // spec.l_sel + min(packed.documents, segment) + 1
            blocks, longest = aligned(min(packed.blocks, touched)), min(segment, packed.longest)
        return cls(batch, tokens, groups, blocks, slots, spec.l_sel, segment, segments_per_chunk, longest, item)

    @property
    def segments_per_sequence(self) -> int:
        return -(-self.tokens // self.segment)

    @property
    def segments(self) -> int:
        return self.batch * self.segments_per_sequence

    @property
    def chunks(self) -> int:
        return -(-self.segments // self.segments_per_chunk)

    @property
    def sequences_per_chunk(self) -> int:
        """How many a chunk may touch: it holds whole ones, or less than one, of which two may meet in it."""
        return self.segments_per_chunk // self.segments_per_sequence or min(self.segments_per_chunk, 2)

    @property
    def words(self) -> int:
        """Words of marks per list: one bit per token."""
        return -(-self.longest // WORD)

    @property
    def lists_per_chunk(self) -> int:
        return self.segments_per_chunk * self.groups * self.blocks

    @property
    def pairs_per_chunk(self) -> int:
        return self.segments_per_chunk * self.segment * self.groups * self.slots

    @property
    def items_per_chunk(self) -> int:
        """A bound known without looking at the data: full items, and one unfilled one per list that has any."""
        return aligned(self.pairs_per_chunk // self.item + min(self.lists_per_chunk, self.pairs_per_chunk))

    @property
    def parts_per_chunk(self) -> int:
        """A bound on the items of lists that have several: such a list fills more than half of its items."""
        return min(self.items_per_chunk, 2 * self.pairs_per_chunk // self.item)

    def chunk_from(self, first_segment: int) -> tuple[int, int, int, int]:
        """Return a chunk's first segment, its number of segments, the segments per sequence, and tokens per segment."""
        segments = min(self.segments_per_chunk, self.segments - first_segment)
        return first_segment, segments, self.segments_per_sequence, self.segment

    def first_token(self, segment: int) -> int:
        """Position of a segment's first token among all tokens of the batch."""
        sequence, part = divmod(segment, self.segments_per_sequence)
        return sequence * self.tokens + min(self.tokens, part * self.segment)


def stays_whole(q_BSHD: Tensor, packed: PackedTables | None) -> bool:
    """Whether the longest sequence, or document, fits into the smallest chunk of a large call."""
    batch, tokens = q_BSHD.shape[:2]
    return (packed.longest if packed else tokens) * MOST_CHUNKS <= max(LARGE, batch * tokens)


def chunks_of(q_BSHD: Tensor, spec: NSASpec, packed: PackedTables | None, of_cut: int) -> int:
    """Chunks of a large call: as many as keep each one's partial results within CHUNK_BYTES, but at most MOST_CHUNKS.

    It is `of_cut` if a sequence must be cut.
    """
    if not stays_whole(q_BSHD, packed):
        return of_cut
    batch, tokens, heads, dim = q_BSHD.shape
    _, parts = block_tiles(spec)
    rows = max(LARGE, batch * tokens) * spec.n_sel * parts * heads
    each = PACKED_CHUNK_BYTES if packed else CHUNK_BYTES
    return min(MOST_CHUNKS, cdiv(rows * dim * q_BSHD.element_size(), each))


def cached_segment(q_BSHD: Tensor, heads_per_group: int, spec: NSASpec) -> int:
    """Tokens of a segment: few, so that what is read for each of their slots stays in L2, but lists must fill items."""
    _, tokens, _, dim = q_BSHD.shape
    bytes_per_token = 2 * heads_per_group * dim * q_BSHD.element_size()
    return max(CACHED_BYTES // bytes_per_token, ITEM * spec.selection_blocks(tokens) // spec.n_sel)


def sizes_of(q_BSHD: Tensor, layout: Layout, spec: NSASpec) -> dict[str, Any]:
    """Compile-time sizes: keys held BN (a power of two), SUB such tiles per block, padded head dim BD."""
    heads, dim = q_BSHD.shape[2:]
    keys, parts = block_tiles(spec)
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


def merge_launch(layout: Layout, sizes: dict) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for the kernel that joins a token's partial outputs, in tiles of tokens × heads."""
    rows = max(2048 // sizes["BD"], next_power_of_2(sizes["R"]))
    grid = (cdiv(layout.segment, rows // sizes["R"]) * layout.segments_per_chunk * layout.groups,)
    return grid, {name: sizes[name] for name in ("G", "R", "N", "SUB", "D", "BD")} | {"ROWS": rows}
