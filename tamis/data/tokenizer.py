"""Tokenizers: GPT-2's byte pairs, from the ranks shipped with the package, plain bytes, and files of the user's own.

End-of-text is the last id of every vocabulary. The characters `<|endoftext|>` in a text are ordinary text to all.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tamis.config.vocabulary import TIKTOKEN, tokenizer_file, vocabulary_size
from tamis.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
GPT2_RANKS = Path(__file__).parent / "assets" / "r50k_base.tiktoken"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
MOST_GPT2_RANKS = 50280  # of OpenAI's vocabularies with GPT-2's pattern
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TokenIds = npt.NDArray[np.unsignedinteger[Any]]  # see `id_dtype`


class Tokenizer(Protocol):
    name: str  # built-in, or after the content of its file
    eot: int
    vocab_size: int
    file: Path | None  # of the user's own

    def encode(self, text: str) -> TokenIds: ...

    def to_bytes(self, ids: Iterable[int]) -> bytes: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte, then end-of-text."""

    name = "byte"
    eot = 256
    vocab_size = 257
    file: Path | None = None

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        end = END_OF_TEXT.encode()
        return b"".join(end if i == self.eot else bytes([i]) for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")


class TiktokenTokenizer:
    """Byte pairs computed by tiktoken: GPT-2's, or those of a file of ranks.

    A file of ranks holds no pattern that splits text into words: small vocabularies use GPT-2's, larger ones GPT-4's.
    """

    def __init__(self, ranks: dict[bytes, int], name: str, file: Path | None = None) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

        self.name, self.file = name, file
        self.eot = max(ranks.values()) + 1
        self.vocab_size = self.eot + 1
        self.pattern: str = r50k_pat_str if len(ranks) <= MOST_GPT2_RANKS else GPT4_PATTERN
        self._encoding = tiktoken.Encoding(
            name, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eot}
        )

    def encode(self, text: str) -> TokenIds:
        # Special tokens in text are not recognised, so that a document cannot fake its own end.
        ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return ids.astype(id_dtype(self.vocab_size))

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes([int(i) for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, computed by Hugging Face's tokenizers."""

    def __init__(self, file: Path, name: str) -> None:
        import tokenizers

        self.name = name
        self.file: Path | None = file
        self.vocab_size = vocabulary_size(file)
        self.eot = self.vocab_size - 1
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.encode_special_tokens = True  # in text they are text, so a document cannot fake its own end
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._has_letters_for_bytes = "ByteLevel" in repr(self._tokenizer.decoder)

    def encode(self, text: str) -> TokenIds:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, id_dtype(self.vocab_size))

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes_of(int(i)) for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")

    @functools.lru_cache(maxsize=2**16)  # noqa: B019  tokenizers live as long as the process
    def _bytes_of(self, token: int) -> bytes:
        if token == self.eot:
            return END_OF_TEXT.encode()
        word = self._tokenizer.id_to_token(token)
        if word is None:
            return b""  # an id that the file leaves out
        if self._has_letters_for_bytes and all(letter in _BYTE_OF_LETTER for letter in word):
            return bytes(_BYTE_OF_LETTER[letter] for letter in word)
        if one := re.fullmatch(r"<0x([0-9A-F]{2})>", word):
            return bytes.fromhex(one[1])
        return word.replace("▁", " ").encode()  # SentencePiece's mark for a space


def byte_letters() -> list[str]:
    """A printable letter for every byte, as byte-level BPE files do: itself, or the next unused from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + rest.index(b)) for b in range(256)]


_BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(byte_letters())}


def id_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds every id of a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


@functools.cache
def tokenizer_for(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`."""
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return TiktokenTokenizer(_gpt2_ranks(), name)
    try:
        file = tokenizer_file(name)
        content = file.read_bytes()
        own_name = f"tokenizer-{hashlib.sha256(content).hexdigest()[:12]}{file.suffix}"
        if file.suffix == TIKTOKEN:
            return TiktokenTokenizer(_parsed_ranks(content), own_name, file)
        return HuggingFaceTokenizer(file, own_name)
    except Exception as error:  # the libraries raise anything on a foreign file; the message quotes it
        raise DataError(f"data.tokenizer {name} cannot be opened: {error}") from None


def with_end_of_text(tokenizer: Tokenizer, text: str) -> TokenIds:
    """A document's tokens after an end-of-text token, which separates it from the document before."""
    return np.concatenate([np.array([tokenizer.eot], id_dtype(tokenizer.vocab_size)), tokenizer.encode(text)])


def _gpt2_ranks() -> dict[bytes, int]:
    content = GPT2_RANKS.read_bytes()
    if hashlib.sha256(content).hexdigest() != GPT2_RANKS_SHA256:
        raise DataError(f"{GPT2_RANKS} is damaged: reinstall tamis to restore the GPT-2 ranks")
    return _parsed_ranks(content)


def _parsed_ranks(content: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}
