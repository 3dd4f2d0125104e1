"""Tamis trains language models with Native Sparse Attention, hands off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tamis.data.tokenizer import Tokenizer
    from tamis.generate.load import LanguageModel

__version__ = "0.1.0"


def load(
    path: str | Path, *, max_len: int | None = None, device: str = "auto", precision: str | None = None
) -> tuple[LanguageModel, Tokenizer]:
    """Return the model and tokenizer of a run directory, a checkpoint or an exported folder.

    `model(ids)` returns the logits `[B,S,V]` of token ids `[B,S]`.

    Args:
        path: run directory (its newest valid checkpoint), checkpoint file or folder, or exported folder.
        max_len: longest sequence, by default the trained one.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        precision: `"bf16"`, `"fp16"` or `"fp32"`; by default bf16 on a GPU and fp32 on a CPU.
    """
    from tamis.generate.load import LanguageModel, load_model  # here, so that importing tamis loads no torch

    loaded = load_model(path, max_len=max_len, device=device, precision=precision)
    return LanguageModel(loaded.model), loaded.tokenizer
