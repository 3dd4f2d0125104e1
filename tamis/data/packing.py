"""Document boundaries inside packed rows, for `data.packing: documents`.

Every document begins with an end-of-text token, so the boundaries follow from the tokens: both packings read the same
rows in the same order, fill them completely and lose no token. A document that does not fit is cut at the row's end,
and its rest counts as a document of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tamis.data.errors import DataError

LEAST_TOKENS = 8  # mean tokens per document of a micro-batch; fixes the size of the offsets


def most_documents(rows: int, seq_len: int) -> int:
    """Documents that the offsets of a micro-batch have room for, whatever it holds: one shape for every batch."""
    return rows * (1 + seq_len // LEAST_TOKENS)


def document_offsets(tokens: npt.NDArray[np.int32], end_of_text: int) -> npt.NDArray[np.int32]:
    """`cu_seqlens`, int32 `[most_documents + 1]`, of a micro-batch `[rows, seq_len + 1]` read as one long row.

    Offsets count input tokens, of which each row has `seq_len`. They begin with 0 and are padded with rows · seq_len.
    """
    rows, seq_len = tokens.shape[0], tokens.shape[1] - 1
    begins = tokens[:, :-1] == end_of_text
    begins[:, 0] = True
    starts = np.flatnonzero(begins)
    size = most_documents(rows, seq_len)
    if len(starts) > size:
        raise DataError(
            f"a micro-batch holds {len(starts):,} documents, and data.packing: documents has room for {size:,}: "
            f"remove documents of fewer than {LEAST_TOKENS} tokens, or set data.packing: stream"
        )
    offsets = np.full(size + 1, rows * seq_len, np.int32)
    offsets[: len(starts)] = starts
    return offsets
