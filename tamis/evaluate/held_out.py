"""Bits per byte on text the model was not trained on: a measure that does not depend on the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from tamis.data import document_offsets, validation_batches
from tamis.data.opening import first_samples
from tamis.data.tokenizer import Tokenizer, with_end_of_text
from tamis.evaluate.scoring import token_scores
from tamis.generate.load import LoadedModel
from tamis.model import Decoder
from tamis.run.files.records import read_problem

MOST_TEXT_BYTES = 1 << 30


def held_out_batches(loaded: LoadedModel) -> list[np.ndarray]:
    """Return the validation batches of the run, `[B, S+1]` each; none where nothing is held out."""
    is_text = loaded.config.data.dataset != "synthetic"
    return validation_batches(loaded.config) if is_text else []


def text_batches(loaded: LoadedModel, path: str | Path) -> list[np.ndarray]:
    """Return a text file as batches of one row, of the longest length the model takes; a shorter rest is dropped."""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_TEXT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text file {path} cannot be read: {read_problem(error)}") from None
    if len(text) > MOST_TEXT_BYTES:
        raise ValueError(f"text file {path} is larger than {MOST_TEXT_BYTES >> 20} MiB: give a part of it")
    tokens = with_end_of_text(loaded.tokenizer, text)
    length = min(loaded.model.max_len, len(tokens) - 1)
    if length < 1:
        raise ValueError(f"text file {path} is empty")
    rows = first_samples(iter([tokens]), length, len(tokens) // length)
    return [row[None] for row in rows]


@torch.no_grad()
def bits_per_byte(model: Decoder, tokenizer: Tokenizer, batches: Iterable[np.ndarray], packed: bool) -> float | None:
    """Return the mean bits needed for one byte of text; end-of-text is not predicted. None without text.

    Args:
        packed: tokens attend only within their document, as in training with `data.packing: documents`.
    """
    nats, size = 0.0, 0
    for tokens_BS1 in batches:
        rows = torch.from_numpy(tokens_BS1).to(model.embedding.weight.device, torch.long)
        offsets = None
        if packed:
            offsets = torch.from_numpy(document_offsets(tokens_BS1, tokenizer.eot)).to(rows.device)
        hidden_BSE, _ = model(rows[:, :-1], offsets)
        targets = rows[:, 1:].flatten()
        is_text = targets != tokenizer.eot
        log_p, _ = token_scores(model, hidden_BSE.flatten(0, 1)[is_text], targets[is_text])
        nats -= float(log_p.double().sum())
        size += len(tokenizer.to_bytes(targets[is_text].tolist()))
    return nats / math.log(2) / size if size else None
