"""The embedded sample: State of the Union addresses in FineWeb-Edu's columns, read like any parquet folder.

Also the losses a model must beat on it: those of byte counts and byte-pair counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.data.local_files import LocalFiles
from tamis.data.order import Cursor
from tamis.data.stream import document_order
from tamis.data.tokenizer import tokenizer_for, with_end_of_text

SAMPLE_FOLDER = Path(__file__).parent / "assets" / "sample"


class Entropies(NamedTuple):
    """Nats per byte of held-out text, under counts of the training text."""

    unigram: float
    bigram: float


def sample_source() -> LocalFiles:
    return LocalFiles(SAMPLE_FOLDER)


def entropies(config: Config, validation: list[npt.NDArray[np.int32]]) -> Entropies:
    """The losses that byte and byte-pair counts of the sample's training part reach on its validation batches.

    Measured on the same targets as the model's validation; needs `data.tokenizer: byte`.
    """
    if config.data.dataset != "sample" or config.data.tokenizer != "byte":
        raise ValueError("entropies are of data.dataset: sample with data.tokenizer: byte")
    pairs = _pair_counts(config)
    inputs = np.concatenate([batch[:, :-1].ravel() for batch in validation])
    targets = np.concatenate([batch[:, 1:].ravel() for batch in validation])
    singles = pairs.sum(axis=0) + 1  # add one, so that no probability is zero
    unigram = np.log(singles / singles.sum())[targets]
    given = (pairs + 1) / (pairs + 1).sum(axis=1, keepdims=True)
    bigram = np.log(given[inputs, targets])
    return Entropies(float(-unigram.mean()), float(-bigram.mean()))


def _pair_counts(config: Config) -> npt.NDArray[np.int64]:
    """How often each token follows each other token in the training documents."""
    tokenizer = tokenizer_for("byte")
    size = tokenizer.vocab_size
    counts = np.zeros(size * size, np.int64)
    for window in document_order(config, sample_source()).windows(Cursor(), epochs=1):
        ids = np.concatenate([with_end_of_text(tokenizer, document.text) for document in window.documents])
        counts += np.bincount(ids[:-1].astype(np.int64) * size + ids[1:], minlength=size * size)
    return counts.reshape(size, size)
