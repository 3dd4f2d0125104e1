"""Offsets of packed documents: every token in exactly one document, one shape for every batch, the same order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.config import Config
from tamis.data import DataError, document_offsets, open_loader
from tamis.data.loader import MEAN_TOKENS
from tests.data.conftest import config_of

EOT = 256


def packed(config: Config) -> Config:
    """The config with `data.packing: documents`."""
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": "documents"})})


def lengths(offsets: np.ndarray) -> list[int]:
    return [int(n) for n in np.diff(offsets) if n]


@given(st.lists(st.lists(st.integers(1, 40), min_size=1), min_size=1, max_size=4))
def test_documents_are_cut_at_row_ends_and_cover_every_input_token(rows: list[list[int]]) -> None:
    seq_len = 40
    tokens = np.zeros((len(rows), seq_len + 1), np.int32)
    expected = []
    for row, sizes in zip(tokens, rows, strict=True):
        ends = [end for end in np.cumsum(sizes) if end < seq_len]
        row[[0, *ends]] = EOT
        expected += [int(n) for n in np.diff([0, *ends, seq_len])]
    rooms = [len(rows) * (1 + seq_len // mean) for mean in MEAN_TOKENS]
    if len(expected) > rooms[-1]:
        with pytest.raises(DataError, match=r"data\.packing: documents has room for"):
            document_offsets(tokens, EOT)
        return
    offsets = document_offsets(tokens, EOT)
    assert offsets.dtype == np.int32 and len(offsets) == 1 + min(room for room in rooms if room >= len(expected))
    assert offsets[0] == 0 and offsets[-1] == len(rows) * seq_len
    assert lengths(offsets) == expected


def test_a_row_inside_one_document_is_one_document() -> None:
    assert lengths(document_offsets(np.full((2, 17), 7, np.int32), EOT)) == [16, 16]


def test_both_packings_read_the_same_rows_and_resume_at_the_same_position(corpus) -> None:
    config = config_of(
        data_dataset="fineweb_edu_local", data_local_path=str(corpus), train_accumulate_grad_batches=2, train_seq_len=64
    )
    stream, documents = open_loader(config), open_loader(packed(config))
    for _ in range(5):
        plain, batch = stream.next(), documents.next()
        assert plain.cu_seqlens is None and np.array_equal(plain.tokens, batch.tokens)
        assert len(batch.cu_seqlens) == 2
        assert plain.lengths() == [64] and batch.lengths() == [n for each in batch.cu_seqlens for n in lengths(each)]
        for rows, offsets in zip(batch.tokens, batch.cu_seqlens, strict=True):
            inputs = rows[:, :-1].ravel()
            starts = offsets[:-1][np.diff(offsets) > 0]
            assert set(np.flatnonzero(inputs == EOT)) | {0, 64} == set(starts.tolist())
    assert stream.state() == documents.state()
    again = open_loader(packed(config))
    again.restore(documents.state())
    assert np.array_equal(again.next().cu_seqlens, documents.next().cu_seqlens)
