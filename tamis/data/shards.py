"""Token shards: memory-mapped uint16 files (uint32 above 65,536 tokens) with a manifest, read as one long row.

Sample i of a pass is a fixed stretch of that row. Each pass visits all samples in its own shuffled order, so a position
is the number of samples used.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tamis.config import VOCABULARY, Config
from tamis.data.checksums import ChecksumThread, file_sha256
from tamis.data.errors import DataError, end_of_data
from tamis.data.order import shuffled
from tamis.data.tokenizer import TokenIds, tokenizer_for

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 * 2**20
FORMAT = 1
Split = Literal["train", "val"]
LITTLE_ENDIAN: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Shard:
    file: str
    split: Split
    tokens: int
    documents: int
    sha256: str


@dataclass
class Manifest:
    """The contents of a folder of shards and, while it is being written, the position in the source."""

    tokenizer: str
    origin: str  # where the text came from, for messages
    source: str  # fingerprint of the source's files and of the split
    val_fraction: float
    dtype: str = "uint16"
    format: int = FORMAT
    complete: bool = False
    next_file: int = 0
    next_record: int = 0
    bad_records: int = 0
    empty_documents: int = 0
    shards: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype not in LITTLE_ENDIAN:
            raise ValueError(f"its dtype {self.dtype!r} is none of {', '.join(LITTLE_ENDIAN)}")

    def count(self, what: Literal["tokens", "documents"], split: Split) -> int:
        return sum(getattr(shard, what) for shard in self.shards if shard.split == split)

    @property
    def summary(self) -> str:
        return (
            f"{self.count('tokens', 'train'):,} tokens of {self.count('documents', 'train'):,} documents to train on, "
            f"{self.count('tokens', 'val'):,} of {self.count('documents', 'val'):,} held out, in {len(self.shards)} "
            f"shards; {self.bad_records} records unreadable, {self.empty_documents} empty"
        )

    def to_json(self) -> str:
        totals = {
            f"{split}_{what}": self.count(what, split) for split in ("train", "val") for what in ("tokens", "documents")
        }
        return json.dumps({**asdict(self), **totals}, indent=1) + "\n"


def read_shard_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a folder of shards."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES or not path.is_file():
            raise ValueError(f"it is no file of at most {MOST_MANIFEST_BYTES // 2**20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise DataError(
                f"{path} has format {content['format']}, this version reads {FORMAT}: prepare the data again"
            )
        shards = [_valid(Shard(**shard)) for shard in content.pop("shards")]
        known = {name: value for name, value in content.items() if name in Manifest.__dataclass_fields__}
        return Manifest(**known, shards=shards)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: make it with `tamis data prepare`, or set data.local_path") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): prepare the data again") from error


def _valid(shard: Shard) -> Shard:
    """Check the types of a shard, and that its file is in the folder itself."""
    if not isinstance(shard.file, str) or not re.fullmatch(r"\w[\w.-]*", shard.file):
        raise ValueError(f"the shard {shard.file!r} is not a file name inside the folder")
    counts = (shard.tokens, shard.documents)
    if not all(type(count) is int and 0 <= count < 2**48 for count in counts) or shard.split not in ("train", "val"):
        raise ValueError(f"the shard {shard.file} has no valid split or counts")
    return shard


class TokenRow:
    """All tokens of one split as one array."""

    def __init__(self, folder: Path, manifest: Manifest, split: Split, vocab_size: int) -> None:
        shards = [shard for shard in manifest.shards if shard.split == split and shard.tokens]
        self._paths, self._vocab_size = [folder / shard.file for shard in shards], vocab_size
        self._maps = [_mapped(folder, shard, manifest.dtype) for shard in shards]
        self._ends = np.cumsum([len(tokens) for tokens in self._maps], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._maps else 0

    def stretch(self, start: int, count: int) -> npt.NDArray[np.int32]:
        pieces = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[index - 1]) if index else 0
        while count and index < len(self._maps):
            piece = self._maps[index][start : start + count]
            if piece.max() >= self._vocab_size:
                raise DataError(
                    f"{self._paths[index]} holds the token {piece.max()} between tokens {start:,} and "
                    f"{start + len(piece):,}, outside the vocabulary of {self._vocab_size}: prepare the data again"
                )
            pieces.append(piece)
            count -= len(piece)
            index, start = index + 1, 0
        return np.concatenate(pieces).astype(np.int32)


class ShardSamples:
    """This rank's samples of a folder of shards."""

    is_synthetic = False

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        folder, manifest = open_folder(config)
        self.rank, self.world_size = rank, world_size
        self.seq_len, self.seed, self.epochs = config.train.seq_len, config.train.seed, config.data.epochs
        self._row = TokenRow(folder, manifest, "train", config.vocab_size)
        self.checksums = ChecksumThread({folder / shard.file: shard.sha256 for shard in manifest.shards})
        self._per_epoch = max(0, len(self._row) - 1) // self.seq_len
        if not self._per_epoch:
            raise DataError(
                f"{folder} holds {len(self._row)} training tokens, too few for train.seq_len {self.seq_len}"
            )
        self.tokens_per_pass: int | None = self._per_epoch * self.seq_len
        self.fingerprint = _fingerprint(manifest, config)
        self.description = (
            f"shards: {len(self._row):,} training tokens in {folder}, {manifest.tokenizer} tokens, "
            f"{self._per_epoch:,} samples a pass"
        )
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._next = rank

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """The next `count` samples of this rank, [count, seq_len + 1]; at the end of data all ranks fail together."""
        if self.checksums.damaged:
            raise DataError(f"{self.checksums.damaged} is damaged (its checksum differs): prepare the data again")
        after = self._next - self.rank + count * self.world_size
        if self.epochs is not None and after > self._per_epoch * self.epochs:
            raise end_of_data(self._next - self.rank, self.seq_len, self.epochs)
        rows = [self._sample(self._next + i * self.world_size) for i in range(count)]
        self._next += count * self.world_size
        return np.stack(rows)

    def state(self) -> dict[str, Any]:
        return {"kind": "shards", "fingerprint": self.fingerprint, "samples": self._next - self.rank}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["samples"] + self.rank

    def _sample(self, number: int) -> npt.NDArray[np.int32]:
        epoch, index = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self._per_epoch, self.seed, epoch)
        return self._row.stretch(int(self._order[index]) * self.seq_len, self.seq_len + 1)


def open_folder(config: Config) -> tuple[Path, Manifest]:
    """The folder of `data.local_path` and its manifest; it must be complete and match `data.tokenizer`."""
    folder = Path(str(config.data.local_path))
    manifest = read_shard_manifest(folder)
    if not manifest.complete:
        raise DataError(
            f"{folder} is not finished: run the same `tamis data prepare` again, it continues where it stopped"
        )
    if manifest.tokenizer != tokenizer_for(config.data.tokenizer).name:
        own = tokenizer_of_shards(folder, manifest)
        raise DataError(f"{folder} holds {manifest.tokenizer} tokens: set data.tokenizer to {own}")
    return folder, manifest


def tokenizer_of_shards(folder: Path, manifest: Manifest) -> str:
    """The `data.tokenizer` of a folder: a built-in name, or the file kept in it."""
    return manifest.tokenizer if manifest.tokenizer in VOCABULARY else str(folder / manifest.tokenizer)


def held_out_stretches(config: Config, wanted: int) -> list[npt.NDArray[np.int32]]:
    """The first samples of the held-out shards."""
    row = TokenRow(*open_folder(config), "val", config.vocab_size)
    seq_len = config.train.seq_len
    count = min(wanted, max(0, len(row) - 1) // seq_len)
    return [row.stretch(i * seq_len, seq_len + 1) for i in range(count)]


def damaged_shards(folder: Path) -> list[str]:
    """Names of the files whose checksum differs from the manifest."""
    return [
        shard.file for shard in read_shard_manifest(folder).shards if file_sha256(folder / shard.file) != shard.sha256
    ]


def _mapped(folder: Path, shard: Shard, dtype: str) -> TokenIds:
    path = folder / shard.file
    try:
        tokens = np.memmap(path, LITTLE_ENDIAN[dtype], "r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): prepare the data again") from error
    if len(tokens) != shard.tokens:
        raise DataError(f"{path} holds {len(tokens):,} tokens, not {shard.tokens:,}: prepare the data again")
    return tokens


def _fingerprint(manifest: Manifest, config: Config) -> str:
    what = [[shard.sha256 for shard in manifest.shards], config.train.seq_len, config.train.seed]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
