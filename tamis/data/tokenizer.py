"""Tokenizers: GPT-2's byte pairs, from the ranks shipped with the package, and plain bytes.

End-of-text is the last id of both vocabularies. The characters `<|endoftext|>` in a text are ordinary text to both.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tamis.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
GPT2_RANKS = Path(__file__).parent / "assets" / "r50k_base.tiktoken"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

TokenIds = npt.NDArray[np.uint16]  # both vocabularies fit


class Tokenizer(Protocol):
    name: str
    eot: int
    vocab_size: int

    def encode(self, text: str) -> TokenIds: ...

    def to_bytes(self, ids: Iterable[int]) -> bytes: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte, then end-of-text."""

    name = "byte"
    eot = 256
    vocab_size = 257

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        end = END_OF_TEXT.encode()
        return b"".join(end if i == self.eot else bytes([i]) for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, computed by tiktoken."""

    name = "gpt2"
    eot = 50256
    vocab_size = 50257

    def __init__(self) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks=_read_ranks(GPT2_RANKS),
            special_tokens={END_OF_TEXT: self.eot},
        )

    def encode(self, text: str) -> TokenIds:
        # Special tokens in text are not recognised, so that a document cannot fake its own end.
        ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return ids.astype(np.uint16)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes([int(i) for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")


@functools.cache
def tokenizer_for(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`."""
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    raise DataError(f"data.tokenizer is {name!r}: it must be gpt2 or byte")


def with_end_of_text(tokenizer: Tokenizer, text: str) -> TokenIds:
    """A document's tokens after an end-of-text token, which separates it from the document before."""
    return np.concatenate([np.array([tokenizer.eot], np.uint16), tokenizer.encode(text)])


def _read_ranks(path: Path) -> dict[bytes, int]:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != GPT2_RANKS_SHA256:
        raise DataError(f"{path} is damaged: reinstall tamis to restore the GPT-2 ranks")
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}
