"""The order of documents: files, then windows of documents, shuffled by keys derived from the seed.

The shuffle does not use a library's generator, so it is the same everywhere and any position can be restored exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tamis.data.errors import DataError
from tamis.data.local_files import BadRecord, Record

WINDOW_DOCUMENTS = 1024  # documents shuffled together,
WINDOW_BYTES = 32 * 2**20  # or fewer if they are long: a window is held in memory
SMALL_SOURCE_BYTES = 32 * 2**20  # a source up to this size is read completely, so that something is held out


class Source(Protocol):
    """Files of records: the interface of the hub, local files and the embedded sample."""

    names: list[str]
    sizes: list[int]  # in bytes; empty when unknown

    @property
    def identity(self) -> list[list[str | int]]: ...

    def read(self, file: int, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Records with their numbers, which ascend but may leave gaps."""
        ...

    def place(self, file: int, number: int) -> str:
        """File and line of a record, for messages."""
        ...


class Cursor(NamedTuple):
    """A position: epoch, index among the epoch's shuffled files, next record."""

    epoch: int = 0
    file: int = 0
    record: int = 0


class Document(NamedTuple):
    text: str
    size: int  # in UTF-8 bytes
    hash: int


@dataclass
class Window:
    start: Cursor
    documents: list[Document]


@dataclass
class Skipped:
    """Records skipped since the source was opened."""

    bad: int = 0
    empty: int = 0
    last_bad: str = ""


@dataclass
class DocumentOrder:
    """The training or held-out documents of a source in their fixed order."""

    source: Source
    seed: int
    held_out_below: int  # documents whose hash is below this are held out
    skip_bad: bool = False
    skipped: Skipped = field(default_factory=Skipped)

    def windows(self, start: Cursor, epochs: int | None) -> Iterator[Window]:
        """Yield windows of shuffled training documents from a window's start until the last epoch ends."""
        epoch, file, record = start
        while epochs is None or epoch < epochs:
            found = False
            for window in self._windows_of_epoch(Cursor(epoch, file, record)):
                found = True
                yield window
            if not found and (file, record) == (0, 0):
                raise DataError("the data holds no training document: add data, or lower data.val_fraction")
            epoch, file, record = epoch + 1, 0, 0

    def held_out(self) -> Iterator[Document]:
        """Yield held-out documents in file order."""
        for file in range(len(self.source.names)):
            for _, document in self.documents(file):
                if self.is_held_out(document):
                    yield document

    def is_held_out(self, document: Document) -> bool:
        return document.hash < self.held_out_below

    def _windows_of_epoch(self, start: Cursor) -> Iterator[Window]:
        documents: list[Document] = []
        size = 0
        for after, document in self._training_documents(start):
            documents.append(document)
            size += document.size
            if len(documents) >= WINDOW_DOCUMENTS or size >= WINDOW_BYTES:
                yield Window(start, self._shuffled(start, documents))
                start, documents, size = after, [], 0
        if documents:
            yield Window(start, self._shuffled(start, documents))

    def _shuffled(self, start: Cursor, documents: list[Document]) -> list[Document]:
        return [documents[i] for i in shuffled(len(documents), self.seed, *start)]

    def _training_documents(self, start: Cursor) -> Iterator[tuple[Cursor, Document]]:
        files = shuffled(len(self.source.names), self.seed, start.epoch)
        for file in range(start.file, len(files)):
            first = start.record if file == start.file else 0
            for number, document in self.documents(int(files[file]), first):
                if not self.is_held_out(document):
                    yield Cursor(start.epoch, file, number + 1), document

    def documents(self, file: int, start: int = 0) -> Iterator[tuple[int, Document]]:
        """Yield number and text of each document of one file; unreadable ones are counted or raise an error."""
        for number, record in self.source.read(file, start):
            document = _document(record) if isinstance(record, bytes) else record
            if isinstance(document, BadRecord):
                self._note_bad(f"{self.source.place(file, number)}: {document.reason}")
            elif document:
                yield number, document
            else:
                self.skipped.empty += 1

    def _note_bad(self, problem: str) -> None:
        if not self.skip_bad:
            raise DataError(f"unreadable record at {problem}; mend it, or set data.on_bad_record: skip to skip it")
        self.skipped.bad += 1
        self.skipped.last_bad = problem


def held_out_below(source: Source, fraction: float) -> int:
    """The hash below which documents are held out: the given fraction, and at least one of a small source."""
    if fraction == 0:
        return 0
    threshold = int(fraction * 2**64)
    if source.sizes and sum(source.sizes) <= SMALL_SOURCE_BYTES:
        every = DocumentOrder(source, 0, 2**64, skip_bad=True)
        hashes = sorted({document.hash for file in range(len(source.names)) for _, document in every.documents(file)})
        if len(hashes) > 1:  # a single document stays in training
            threshold = max(threshold, hashes[0] + 1)
    return threshold


def shuffled(count: int, *key: int) -> npt.NDArray[np.int64]:
    """The numbers below `count` in an order that depends on the key alone."""
    mixed = np.uint64(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little"))
    return np.argsort(_splitmix64(np.arange(count, dtype=np.uint64) + mixed), kind="stable")


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64, a bijection that mixes 64-bit numbers well (Steele, Lea and Flood 2014)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _document(raw: bytes) -> Document | BadRecord | None:
    """Decode a record. Its hash is of the bytes, so that copies of a document land in the same split."""
    if not raw.strip():
        return None
    try:
        digest = hashlib.blake2b(raw, digest_size=8).digest()
        return Document(raw.decode(), len(raw), int.from_bytes(digest, "little"))
    except UnicodeDecodeError as error:
        return BadRecord(f"invalid UTF-8 ({error})")
