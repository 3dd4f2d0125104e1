"""Documents of local files: parquet, JSONL and text (also .gz and .zst), one record at a time, from any record on.

A record is the UTF-8 bytes of a document, None if it is empty (a blank line, a null), or a BadRecord with the reason.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tamis.data.errors import DataError
from tamis.data.tokenizer import END_OF_TEXT

PARQUET, JSONL, TEXT = (".parquet",), (".jsonl", ".ndjson"), (".txt", ".text", ".md")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # of JSONL and text; Arrow's names
READ_BYTES = 2**20  # decompressed at a time
ROWS_PER_BATCH = 256
TEXT_PIECE_BYTES = 16 * 1024  # a text file without separators is cut at the first blank line after this many bytes …
TEXT_PIECE_LIMIT = 4 * TEXT_PIECE_BYTES  # … or at the first line end after this many; longer lines are cut
MOST_LINE_BYTES = 16 * 2**20  # of a JSONL file


@dataclass(frozen=True)
class BadRecord:
    reason: str


Record = bytes | BadRecord | None


class LocalFiles:
    """A file or a folder of files that hold documents."""

    def __init__(self, path: str | Path, text_column: str = "text") -> None:
        self.path = Path(path)
        self.text_column = text_column
        self.files = _list_files(self.path)
        self.names = [str(file.relative_to(self.path)) if self.path.is_dir() else file.name for file in self.files]
        self.sizes = [file.stat().st_size for file in self.files]

    @property
    def identity(self) -> list[list[str | int]]:
        """Names and sizes; a stored position is valid only while they stay the same."""
        return [[name, size] for name, size in zip(self.names, self.sizes, strict=True)]

    def place(self, file: int, number: int) -> str:
        return f"{self.files[file]}:{number + 1}"

    def read(self, file: int, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Yield the records of one file with their numbers, from number `start` on."""
        path = self.files[file]
        if path.name.endswith(PARQUET):
            return enumerate(read_parquet(path, self.text_column, start), start)
        if _plain_name(path).endswith(JSONL):
            return enumerate(read_jsonl(path, self.text_column, start), start)
        return itertools.islice(enumerate(read_text_file(path)), start, None)


def read_parquet(path: Path, text_column: str, start: int = 0) -> Iterator[Record]:
    import pyarrow as pa

    try:
        with path.open("rb") as content:
            yield from parquet_records(content, text_column, start, path.name)
    except (pa.ArrowException, OSError) as error:
        problem = " ".join(str(error).split())  # Arrow's messages may have several lines
        raise DataError(f"{path} cannot be read as parquet ({problem}): replace or remove the file") from error


def parquet_records(content: BinaryIO, text_column: str, start: int, name: str) -> Iterator[Record]:
    """Yield the records of an open parquet file from number `start` on, read in this thread alone."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(content, pre_buffer=False) as file:
        check_column(text_column, file.schema_arrow.names, name)
        groups, skip = row_groups_from(file.metadata, start)
        rows = {"batch_size": ROWS_PER_BATCH, "row_groups": groups, "columns": [text_column]}
        for batch in file.iter_batches(**rows, use_threads=False):
            if skip < len(batch):
                yield from column_records(batch.column(0)[skip:])
            skip = max(0, skip - len(batch))


def row_groups_from(metadata: object, start: int) -> tuple[list[int], int]:
    """The row groups that hold records from `start` on, and how many rows of the first to skip."""
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]  # type: ignore[attr-defined]
    first = 0
    while first < len(rows) and start >= rows[first]:
        start -= rows[first]
        first += 1
    return list(range(first, len(rows))), start


def column_records(column: object) -> Iterator[Record]:
    """Yield the values of an Arrow string column as raw bytes, so that invalid UTF-8 affects one record only."""
    import pyarrow as pa

    kind = column.type  # type: ignore[attr-defined]
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
        raise DataError(f"the text column holds {kind}, not text: set data.text_column")
    yield from column.cast(pa.large_binary()).to_pylist()  # type: ignore[attr-defined]


def check_column(text_column: str, names: list[str], where: str) -> None:
    if text_column not in names:
        raise DataError(f"{where} has no column {text_column!r}: set data.text_column to one of {', '.join(names)}")


def read_jsonl(path: Path, text_column: str, start: int = 0) -> Iterator[Record]:
    """Yield one record per line, so that a record's number is its line."""
    number, is_rest = 0, False
    for line in _lines(path, MOST_LINE_BYTES):
        is_whole = line.endswith(b"\n") or len(line) < MOST_LINE_BYTES
        if number >= start and not is_rest:
            too_long = BadRecord(f"a line of more than {MOST_LINE_BYTES // 2**20} MiB; split the document")
            yield _json_record(line, text_column) if is_whole else too_long
        number, is_rest = number + is_whole, not is_whole


def _lines(path: Path, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file; a longer line comes in parts of `most_bytes`."""
    try:
        with _opened(path) as file:
            yield from iter(lambda: file.readline(most_bytes), b"")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): replace or remove the file") from error


def _opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz or .zst."""
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(path, compression=COMPRESSED[path.suffix]), READ_BYTES)


def _plain_name(path: Path) -> str:
    """The name without .gz or .zst."""
    return path.stem if path.suffix in COMPRESSED else path.name


def _json_record(line: bytes, text_column: str) -> Record:
    if not line.strip():
        return None
    try:
        value = json.loads(line)
        text = value[text_column]
        return text.encode() if text is not None else None
    except RecursionError:
        return BadRecord("JSON that is nested too deeply")
    except UnicodeError as error:
        return BadRecord(f"invalid Unicode ({error})")
    except ValueError as error:
        return BadRecord(f"not JSON ({error})")
    except KeyError:
        return BadRecord(f"no key {text_column!r} (see data.text_column)")
    except (TypeError, AttributeError):
        return BadRecord(f"not an object with text under {text_column!r}")


def read_text_file(path: Path) -> Iterator[Record]:
    """Yield documents, which end at a line `<|endoftext|>`; longer text is cut at a blank line. No text is lost."""
    piece, size = [], 0
    mark = END_OF_TEXT.encode()
    for line in _cut_lines(path):
        ends = line.strip() == mark
        if not ends:
            piece.append(line)
            size += len(line)
        if ends or size >= TEXT_PIECE_LIMIT or (size >= TEXT_PIECE_BYTES and not line.strip()):
            yield b"".join(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece)


def _cut_lines(path: Path) -> Iterator[bytes]:
    """Yield lines; those above TEXT_PIECE_LIMIT are cut after a space if there is one, never inside a character."""
    rest = b""
    for part in _lines(path, TEXT_PIECE_LIMIT):
        line = rest + part
        is_whole = part.endswith(b"\n") or len(part) < TEXT_PIECE_LIMIT
        end = len(line) if is_whole else line.rfind(b" ", TEXT_PIECE_LIMIT // 2) + 1 or _last_character(line)
        yield line[:end]
        rest = line[end:]
    if rest:
        yield rest


def _last_character(text: bytes) -> int:
    """Where the last UTF-8 character begins."""
    return next((len(text) - back for back in range(1, 5) if text[-back] & 0xC0 != 0x80), len(text))


def _list_files(path: Path) -> list[Path]:
    known = f"{', '.join(PARQUET + JSONL + TEXT)}; all but parquet also with {' or '.join(COMPRESSED)}"
    if path.is_file():
        if not _is_known(path):
            raise DataError(f"data.local_path {path} is no known kind of file: {known}")
        return [path]
    if not path.is_dir():
        raise DataError(f"data.local_path {path} does not exist")
    files = sorted(f for f in path.rglob("*") if f.is_file() and _is_known(f) and not _hidden(f, path))
    if not files:
        hint = ": set data.dataset to shards" if (path / "manifest.json").exists() else ""
        raise DataError(f"data.local_path {path} holds no file of a known kind ({known}){hint}")
    return files


def _is_known(path: Path) -> bool:
    return path.name.endswith(PARQUET) or _plain_name(path).endswith(JSONL + TEXT)


def _hidden(file: Path, root: Path) -> bool:
    return bool(re.search(r"(^|/)[._]", str(file.relative_to(root))))
