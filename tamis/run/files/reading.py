"""Bounded reads of run files that never block: only regular files, and no link that leaves the file's directory.

A folder, a FIFO or a huge file in place of a run file is an OddFile, an OSError whose message names the problem.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

MIB = 1024**2
LONGEST_ROW_BYTES = 512
MOST_DOCUMENT_BYTES = 4 * MIB  # of a JSON, YAML or text file that is read as a whole
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class OddFile(OSError):
    """Something that is no regular file of a bearable size, where a run file should be."""


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file. Raises FileNotFoundError, or OddFile for anything else."""
    try:
        descriptor = _open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _explained(path, error) from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OddFile(f"{Path(path).name} is {KINDS.get(kind, 'a device')}, not a file")
    return descriptor


def is_regular(path: str | Path) -> bool:
    """True if the file can be opened and read."""
    try:
        os.close(open_regular(path))
    except OSError:
        return False
    return True


def open_to_read(path: str | Path) -> IO[bytes]:
    return os.fdopen(open_regular(path), "rb")


def open_to_append(path: str | Path) -> IO[bytes]:
    """Open for appending, without a buffer; a missing file is created."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def read_bytes(path: str | Path, most: int = MOST_DOCUMENT_BYTES) -> bytes:
    with open_to_read(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OddFile(f"{Path(path).name} is larger than {most / MIB:g} MiB")
    return content


def read_text(path: str | Path, most: int = MOST_DOCUMENT_BYTES) -> str:
    return read_bytes(path, most).decode(errors="replace")


def read_json(path: str | Path) -> Any:
    """Parse a JSON document; a ValueError when it is none, or nested too deeply."""
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        raise ValueError(f"{Path(path).name} is not valid JSON") from None


def parse_json_line(line: str | bytes) -> dict[str, Any] | None:
    """The object of one line; None for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_last_lines(path: str | Path, most_bytes: int, most_lines: int | None = None) -> list[bytes]:
    """The complete lines in the last `most_bytes` of a file, at most `most_lines`; none if there is no such file."""
    try:
        with open_to_read(path) as file:
            lines = _last_lines(file, most_bytes, most_lines)
    except OSError:
        return []
    return lines if most_lines is None else lines[-most_lines:]


def sample_lines(file: IO[bytes], count: int, tail_bytes: int) -> list[bytes]:
    """`count` lines at evenly spaced positions of a long file, then all lines of its last `tail_bytes`.

    The file is left at the end of the last complete line.
    """
    older = max(0, file.seek(0, os.SEEK_END) - tail_bytes)
    sampled = [_line_at(file, older * number // count) for number in range(count if older else 0)]
    newest = _last_lines(file, tail_bytes, None)
    return [line for line in sampled if line] + newest


def lines_after(file: IO[bytes], offset: int, most: int) -> tuple[list[bytes], int]:
    """The complete lines in the next `most` bytes, and where the next look begins; a longer line is skipped."""
    file.seek(offset)
    block = file.read(most)
    complete, newline, _ = block.rpartition(b"\n")
    return complete.split(b"\n"), offset + (len(complete) + len(newline) or (len(block) if len(block) == most else 0))


def _last_lines(file: IO[bytes], most_bytes: int, most_lines: int | None) -> list[bytes]:
    """Read backwards until there are enough lines; a line cut at the beginning is dropped."""
    end = position = file.seek(0, os.SEEK_END)
    block = b""
    while position > max(0, end - most_bytes) and (most_lines is None or block.count(b"\n") <= most_lines):
        size = most_bytes if most_lines is None else max(len(block), 1 << 16)  # doubled, so that few copies are made
        size = min(size, position - max(0, end - most_bytes))
        position = file.seek(position - size)
        block = file.read(size) + block
    *lines, rest = block.split(b"\n")
    file.seek(end - len(rest))
    return lines[1:] if position > 0 else lines


def _line_at(file: IO[bytes], offset: int) -> bytes:
    """The first complete line after `offset`; empty where a line is longer than a row can be."""
    parts = os.pread(file.fileno(), LONGEST_ROW_BYTES, offset).split(b"\n", 2)  # no more than this, unlike file.read
    return parts[1] if len(parts) == 3 else b""


def _open(path: str | Path, flags: int) -> int:
    flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return os.open(_link_target(Path(path)), flags, 0o644)


def _link_target(path: Path) -> str:
    """The file that a link names, if it lies in the link's own directory."""
    target, directory = os.path.realpath(path, strict=True), os.path.realpath(path.parent)
    if os.path.commonpath([target, directory]) != directory:
        raise OddFile(f"{path.name} is a link out of its directory")
    return target


def _explained(path: str | Path, error: OSError) -> OddFile:
    if isinstance(error, OddFile):
        return error
    reasons = {errno.ELOOP: "is a link to itself", errno.ENXIO: "is a FIFO or a socket, not a file"}
    reasons |= {errno.EISDIR: "is a folder, not a file", errno.ENOTDIR: "lies in no folder"}
    odd = OddFile(f"{Path(path).name} {reasons.get(error.errno or 0, f'cannot be opened: {error.strerror}')}")
    odd.errno = error.errno
    return odd
