"""Checksums of token shards, computed once per machine in the background of training.

Verified files are remembered by identity (device, inode, size, time of change) in the user's cache folder. A lock there
makes one process per machine do the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from pathlib import Path

CHUNK_BYTES = 2**20
REMEMBERED = 100_000  # files


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tamis"


class ChecksumThread:
    """Compares files with their checksums in a background thread; `damaged` names the first that differs."""

    def __init__(self, expected: dict[Path, str]) -> None:
        self.damaged: Path | None = None
        self._expected = expected
        self._thread = threading.Thread(target=self._run, name="tamis-checksums", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            with (cache_folder() / "shards.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._compare(cache_folder() / "verified_shards.json")
        except BlockingIOError:
            return  # another process on this machine does it
        except OSError:  # no cache folder: compare without remembering
            self._compare(None)

    def _compare(self, memory: Path | None) -> None:
        verified = _read(memory)
        for path, sha256 in self._expected.items():
            key = f"{_identity(path)}:{sha256}"
            if key in verified:
                continue
            if file_sha256(path) != sha256:
                self.damaged = path
                return
            verified = [*verified[-REMEMBERED:], key]
            if memory is not None:
                _write(memory, verified)


def file_sha256(path: Path) -> str:
    """The checksum of a file, or "unreadable"."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "unreadable"


def _identity(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _read(memory: Path | None) -> list[str]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(memory.read_text(encoding="utf-8")) if memory else []
        return [key for key in content if isinstance(key, str)]
    return []


def _write(memory: Path, verified: list[str]) -> None:
    scratch = memory.with_suffix(".tmp")
    scratch.write_text(json.dumps(verified), encoding="utf-8")
    scratch.replace(memory)
