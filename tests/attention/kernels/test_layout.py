"""How the selected branch cuts its tokens into segments, chunks and items."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.attention.kernels.selected.backward import item_of_sweep
from tamis.attention.kernels.selected.layout import (
    CHUNK_BYTES,
    Layout,
    cached_segment,
    chunks_of,
    stays_whole,
)


def test_segments_cut_for_the_cache_stay_long_enough_for_their_lists() -> None:
    def layout(tokens: int, segment: int | None, chunk: int | None = None) -> Layout:
        ids = torch.empty(1, tokens, 2, 16, dtype=torch.int32, device="meta")
        return Layout.of(ids, NSASpec(), 4, chunk, segment=segment)

    assert layout(8192, None).segment == 8192 and layout(8192, 3072).segment == 2752
    assert layout(65536, None).segment == 16384 and layout(65536, 3072).segment == 4096  # 1,024 lists, of 64 on average
    assert layout(65536, 3072).segments_per_chunk == 4 and layout(65536, 1 << 20).segment == 16384
    assert layout(65536, 3072, chunk=1024).segment == 1024


def test_chunks_hold_whole_sequences_where_they_fit() -> None:
    def layout(batch: int, tokens: int, segment: int, chunk: int) -> Layout:
        return Layout.of(
            torch.empty(batch, tokens, 2, 16, dtype=torch.int32, device="meta"), NSASpec(), 4, chunk, segment=segment
        )

    two, part = layout(8, 8192, 3072, 16384), layout(2, 8192, 1024, 4096)
    assert (two.segment, two.segments_per_chunk, two.sequences_per_chunk, two.chunks) == (2752, 6, 2, 4)
    assert (part.segments_per_chunk, part.segments_per_sequence, part.sequences_per_chunk) == (4, 8, 2)
    assert layout(1, 8192, 3072, 16384).segments_per_chunk == 3 and layout(1, 8192, 1 << 20, 16384).segments == 1


def test_segments_of_the_halves_stay_in_the_cache_and_fill_their_items() -> None:
    def segment(tokens: int) -> int:
        q = torch.empty(1, tokens, 64, 128, dtype=torch.bfloat16, device="meta")
        return cached_segment(q, 16, NSASpec())

    assert [segment(tokens) for tokens in (2048, 8192, 16384)] == [1024, 2048, 4096]


def queries(batch: int, tokens: int, heads: int, dim: int) -> Tensor:
    return torch.empty(batch, tokens, heads, dim, dtype=torch.bfloat16, device="meta")


def test_chunks_are_few_and_their_partial_results_take_a_gibibyte() -> None:
    spec = NSASpec()
    m7c = [chunks_of(queries(batch, 2048, 12, 64), spec, None, of_cut=5) for batch in (1, 32, 42, 1024)]
    assert m7c == [2, 2, 2, 4]  # a small call is cut as one of 65,536 tokens
    assert 42 * 2048 * spec.n_sel * 12 * 64 * 2 <= 2 * CHUNK_BYTES < 44 * 2048 * spec.n_sel * 12 * 64 * 2
    assert chunks_of(queries(32, 2048, 64, 128), spec, None, of_cut=5) == 4
    assert chunks_of(queries(32, 2048, 2, 64), spec, None, of_cut=5) == 1
    assert chunks_of(queries(32, 2048, 12, 64), NSASpec(l_sel=128), None, of_cut=5) == 3  # each block leaves two parts
    assert chunks_of(queries(2, 32768, 12, 64), spec, None, of_cut=5) == 5


def test_sequences_stay_whole_up_to_a_quarter_of_a_large_call() -> None:
    assert stays_whole(queries(4, 16384, 12, 64), None) and not stays_whole(queries(2, 32768, 12, 64), None)
    assert stays_whole(queries(1, 16384, 12, 64), None) and stays_whole(queries(4, 32768, 12, 64), None)


def test_items_of_the_sweep_are_long_where_a_chunk_has_enough_of_them() -> None:
    def item(batch: int, tokens: int, chunks: int) -> int:
        return item_of_sweep(torch.empty(batch, tokens, 2, 16, dtype=torch.int32, device="meta"), chunks)

    assert [item(batch, 2048, chunks=2) for batch in (64, 32, 16, 8, 4, 1)] == [1024, 1024, 1024, 512, 256, 256]
    assert [item(1, tokens, chunks=5) for tokens in (131072, 65536, 1)] == [1024, 512, 256]
