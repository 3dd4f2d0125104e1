"""Turn any document source into token shards: read once, tokenised by several threads, written in order.

The result does not depend on the number of threads. After a kill the same command continues from the last finished
pair of shards. tiktoken releases Python's lock, so threads are as fast as processes here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tamis.config import Config, Data
from tamis.config.schema import LOCAL
from tamis.data.errors import DataError
from tamis.data.opening import open_source
from tamis.data.order import DocumentOrder
from tamis.data.shards import LITTLE_ENDIAN, MANIFEST, Manifest, Shard, Split, read_shard_manifest
from tamis.data.stream import document_order
from tamis.data.tokenizer import TokenIds, Tokenizer, id_dtype, tokenizer_for, with_end_of_text

SHARD_TOKENS = 100_000_000  # 200 MB a file
CHUNK_BYTES = 256 * 1024  # text handed to a thread at a time
CHUNKS_AHEAD = 4  # per thread
REPORT_EVERY_S = 2.0

Encoded = dict[Split, list[TokenIds]]  # the tokens of documents


@dataclass(frozen=True)
class PrepareProgress:
    files_done: int
    files: int
    documents: int
    tokens: int
    tokens_per_s: float  # since this command began
    tokens_per_processor_s: float  # by the CPU time of all threads: the speed of one idle core

    def __str__(self) -> str:
        return (
            f"{self.files_done}/{self.files} files, {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.tokens_per_s:,.0f} tok/s ({self.tokens_per_processor_s:,.0f} per second of processor time)"
        )


@dataclass(frozen=True)
class Reached:
    """How far a source was read and what was skipped on the way; fields of the manifest."""

    next_file: int
    next_record: int
    bad_records: int
    empty_documents: int


@dataclass
class DocumentChunk:
    """Consecutive documents, each with its split, and how far the source was read for them."""

    documents: list[tuple[Split, str]]
    reached: Reached


def prepare(
    config: Config,
    out: str | Path,
    *,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[PrepareProgress], None] = lambda progress: None,
) -> Manifest:
    """Tokenise the source of `config.data` into the folder `out`, continuing where an earlier call stopped."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            return _prepare(config, folder, workers or os.cpu_count() or 1, shard_tokens, report)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error}): free space or choose another folder; finished shards are kept, "
            "and the same command continues from there"
        ) from error


def _prepare(
    config: Config, folder: Path, workers: int, shard_tokens: int, report: Callable[[PrepareProgress], None]
) -> Manifest:
    order = document_order(config, open_source(config))
    manifest = _begun_manifest(config, order, folder)
    if manifest.complete:
        return manifest
    meter = _Meter(manifest, len(order.source.names), report)
    pair = ShardPair(folder, manifest)
    chunks = _chunks(order, manifest, min(CHUNK_BYTES, shard_tokens))
    tokenizer = tokenizer_for(config.data.tokenizer)
    if tokenizer.file:
        shutil.copyfile(tokenizer.file, folder / manifest.tokenizer)
    for chunk, encoded in _encoded(chunks, tokenizer, workers):
        pair.append(encoded)
        meter.count(encoded, chunk.reached.next_file)
        if pair.tokens >= shard_tokens:
            manifest = pair.finish(chunk.reached, complete=False)
            pair = ShardPair(folder, manifest)
        reached = chunk.reached
    if not (pair.tokens or manifest.shards):
        raise DataError(f"{manifest.origin} holds no training document: there is nothing to prepare")
    manifest = pair.finish(reached, complete=True)
    meter.report()
    return manifest


def _begun_manifest(config: Config, order: DocumentOrder, folder: Path) -> Manifest:
    """The manifest of an earlier call, or a new one; shards of another source are refused."""
    data = config.data
    tokenizer = tokenizer_for(data.tokenizer)
    what = [order.source.identity, data.text_column, data.val_fraction]
    source = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    if not (folder / MANIFEST).exists():
        return Manifest(
            tokenizer.name, _origin(data), source, data.val_fraction, id_dtype(tokenizer.vocab_size).__name__
        )
    manifest = read_shard_manifest(folder)
    if (manifest.source, manifest.tokenizer) != (source, tokenizer.name):
        raise DataError(f"{folder} holds shards of another source, split or tokenizer: choose another folder")
    return manifest


def _origin(data: Data) -> str:
    hub = f"{data.hub_name} {data.hub_subset} {data.hub_revision or ''}".rstrip()
    where = hub if data.dataset == "fineweb_edu" else data.local_path if data.dataset in LOCAL else ""
    return f"{data.dataset} {where or ''}".rstrip()


def _chunks(order: DocumentOrder, start: Manifest, chunk_bytes: int) -> Iterator[DocumentChunk]:
    """Yield the documents from the manifest's position in file order; the last chunk marks the end."""

    def chunk(next_file: int, next_record: int) -> DocumentChunk:
        bad, empty = start.bad_records + order.skipped.bad, start.empty_documents + order.skipped.empty
        return DocumentChunk(documents, Reached(next_file, next_record, bad, empty))

    documents: list[tuple[Split, str]] = []
    size = 0
    for file in range(start.next_file, len(order.source.names)):
        for number, document in order.documents(file, start.next_record if file == start.next_file else 0):
            documents.append(("val" if order.is_held_out(document) else "train", document.text))
            size += document.size
            if size >= chunk_bytes:
                yield chunk(file, number + 1)
                documents, size = [], 0
    yield chunk(len(order.source.names), 0)


def _encoded(
    chunks: Iterator[DocumentChunk], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[DocumentChunk, Encoded]]:
    """Yield chunks with their tokens in order while the threads work ahead."""
    ahead: deque[tuple[DocumentChunk, Future[Encoded]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="tamis-tokenise") as pool:
        for chunk in chunks:
            ahead.append((chunk, pool.submit(_encode, tokenizer, chunk)))
            if len(ahead) > workers * CHUNKS_AHEAD:
                chunk, future = ahead.popleft()
                yield chunk, future.result()
        while ahead:
            chunk, future = ahead.popleft()
            yield chunk, future.result()


def _encode(tokenizer: Tokenizer, chunk: DocumentChunk) -> Encoded:
    encoded: Encoded = {"train": [], "val": []}
    for split, text in chunk.documents:
        encoded[split].append(with_end_of_text(tokenizer, text))
    return encoded


class _Meter:
    """Counts tokens and documents and reports them every 2 s."""

    def __init__(self, manifest: Manifest, files: int, report: Callable[[PrepareProgress], None]) -> None:
        self._tokens = self._before = manifest.count("tokens", "train") + manifest.count("tokens", "val")
        self._documents = manifest.count("documents", "train") + manifest.count("documents", "val")
        self._files, self._files_done, self._report = files, manifest.next_file, report
        self._began = self._reported = time.perf_counter()
        self._processor_began = time.process_time()

    def count(self, encoded: Encoded, files_done: int) -> None:
        self._files_done = files_done
        self._tokens += sum(len(ids) for documents in encoded.values() for ids in documents)
        self._documents += sum(len(documents) for documents in encoded.values())
        if time.perf_counter() - self._reported >= REPORT_EVERY_S:
            self.report()

    def report(self) -> None:
        self._reported = time.perf_counter()
        new = self._tokens - self._before
        rate = new / max(self._reported - self._began, 1e-9)
        processor_rate = new / max(time.process_time() - self._processor_began, 1e-9)
        self._report(
            PrepareProgress(self._files_done, self._files, self._documents, self._tokens, rate, processor_rate)
        )


class ShardPair:
    """The training and held-out shard being written; both appear and enter the manifest when finished."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        number = sum(shard.split == "train" for shard in manifest.shards)
        self._folder, self._manifest = folder, manifest
        self._writers = {split: _ShardWriter(folder, split, number, manifest.dtype) for split in ("train", "val")}

    @property
    def tokens(self) -> int:
        return self._writers["train"].tokens

    def append(self, encoded: Encoded) -> None:
        for split, documents in encoded.items():
            for ids in documents:
                self._writers[split].append(ids)

    def finish(self, reached: Reached, *, complete: bool) -> Manifest:
        shards = [shard for writer in self._writers.values() if (shard := writer.finish())]
        manifest = replace(self._manifest, **asdict(reached), complete=complete, shards=self._manifest.shards + shards)
        temporary = self._folder / f"{MANIFEST}.tmp"
        temporary.write_text(manifest.to_json(), encoding="utf-8")
        _publish(temporary, self._folder / MANIFEST)
        return manifest


class _ShardWriter:
    def __init__(self, folder: Path, split: Split, number: int, dtype: str) -> None:
        self.split, self.tokens, self.documents = split, 0, 0
        self._dtype = LITTLE_ENDIAN[dtype]
        self._path = folder / f"{split}-{number:05d}.bin"
        self._temporary = self._path.with_suffix(".tmp")
        self._file = self._temporary.open("wb")
        self._digest = hashlib.sha256()

    def append(self, ids: TokenIds) -> None:
        content = ids.astype(self._dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)
        self.documents += 1

    def finish(self) -> Shard | None:
        self._file.close()
        if not self.documents:
            self._temporary.unlink()
            return None
        _publish(self._temporary, self._path)
        return Shard(self._path.name, self.split, self.tokens, self.documents, self._digest.hexdigest())


def _publish(temporary: Path, final: Path) -> None:
    """Sync a written file to disk, then give it its final name."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(final)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is preparing {folder}: wait for it, or choose another folder") from None
        yield
