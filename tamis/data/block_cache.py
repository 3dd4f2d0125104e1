"""Remote files kept on disk in blocks as they are read: a restart or a second pass reads the disk.

Blocks are files named by the address and their number, in the folder that HF_DATASETS_CACHE names. When the folder
holds `data.cache_gib`, blocks that are not in it are read from the network and not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 4 * 2**20


class BlockCache:
    """A folder of blocks with a size limit."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self._most = folder, most_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._used = sum(file.stat().st_size for file in folder.glob("*.block"))

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / f"{name}.block").read_bytes()
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Store a block if it fits; a disk that is full only means that it is not stored."""
        if self._used + len(content) > self._most:
            return
        scratch = self.folder / f"{name}.{os.getpid()}.tmp"
        with contextlib.suppress(OSError):
            scratch.write_bytes(content)
            scratch.replace(self.folder / f"{name}.block")
            self._used += len(content)
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


class CachedFile(io.RawIOBase):
    """A remote file read through the cache; it is opened only when a block is missing."""

    def __init__(self, cache: BlockCache, url: str, open_remote: Callable[[], BinaryIO]) -> None:
        self._cache, self._open_remote = cache, open_remote
        self._name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._remote: BinaryIO | None = None
        self._position = 0
        self._number, self._block = -1, b""  # the block read last
        self._size = self._stored_size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._position >= self._size:
            return 0
        number, start = divmod(self._position, BLOCK_BYTES)
        piece = self._load(number)[start : start + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
        super().close()

    def _load(self, number: int) -> bytes:
        if number != self._number:
            size = min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)
            name = f"{self._name}-{number}"
            content = self._cache.read(name)
            if content is None or len(content) != size:
                remote = self._opened()
                remote.seek(number * BLOCK_BYTES)
                content = remote.read(size)
                self._cache.write(name, content)
            self._number, self._block = number, content
        return self._block

    def _opened(self) -> BinaryIO:
        if self._remote is None:
            self._remote = self._open_remote()
        return self._remote

    def _stored_size(self) -> int:
        stored = self._cache.read(f"{self._name}-size")
        if stored is not None and stored.isdigit():
            return int(stored)
        size = self._opened().seek(0, os.SEEK_END)
        self._cache.write(f"{self._name}-size", str(size).encode())
        return size
