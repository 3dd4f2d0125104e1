"""Writing token shards: a training and a held-out file at a time, checksummed, named and listed only when on disk."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tamis.data.shards import MANIFEST, Manifest, Shard, Split
from tamis.data.tokenizer import TokenIds

Encoded = dict[Split, list[TokenIds]]  # the tokens of documents


@dataclass(frozen=True)
class Reached:
    """How far a source was read, and what was passed over until there; fields of the manifest."""

    next_file: int
    next_record: int
    bad_records: int
    empty_documents: int


class ShardPair:
    """The training and the held-out shard being written; both appear, and enter the manifest, when finished."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        number = sum(shard.split == "train" for shard in manifest.shards)
        self._folder, self._manifest = folder, manifest
        self._writers = {split: _ShardWriter(folder, split, number) for split in ("train", "val")}

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
        _settle(temporary, self._folder / MANIFEST)
        return manifest


class _ShardWriter:
    def __init__(self, folder: Path, split: Split, number: int) -> None:
        self.split, self.tokens, self.documents = split, 0, 0
        self._path = folder / f"{split}-{number:05d}.bin"
        self._temporary = self._path.with_suffix(".tmp")
        self._file = self._temporary.open("wb")
        self._digest = hashlib.sha256()

    def append(self, ids: TokenIds) -> None:
        content = ids.astype("<u2", copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)
        self.documents += 1

    def finish(self) -> Shard | None:
        self._file.close()
        if not self.documents:
            self._temporary.unlink()
            return None
        _settle(self._temporary, self._path)
        return Shard(self._path.name, self.split, self.tokens, self.documents, self._digest.hexdigest())


def _settle(temporary: Path, final: Path) -> None:
    """Give a written file its name only once its content is on disk."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(final)
