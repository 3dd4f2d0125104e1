"""A store that fsspec reaches: S3 and what is compatible with it, Google, Azure, the Hugging Face hub, and others.

Credentials come from the variables and files of the store's own tool. An object cannot be continued where an upload
was cut, so large files are uploaded in parts, and a part that is there already is not sent again.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tamis.config import ConfigError
from tamis.run.copies.store import CHUNK_BYTES, StoreError, Transfer, TransferCancelled, store_error

PART_BYTES = 64 << 20
PARTS = ".parts"  # NAME.parts/00000 and so on hold a file of more than one part


class FsspecStore:
    """See `Store`. Checksums are computed from what the store returns: it is read back after an upload."""

    def __init__(self, url: str, part_bytes: int = PART_BYTES) -> None:
        self.part_bytes = part_bytes
        try:
            import fsspec

            self.files, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            scheme = url.partition("://")[0]
            raise ConfigError(
                f"copies to {scheme}:// need a package that is missing ({error}): "
                f"pip install 'tamis[copy]' has s3://; fsspec's page names the one of each other scheme"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{url} is no address for copies: {error}") from None

    def names(self, folder: str = "") -> list[str]:
        with _explained():
            try:
                found = self.files.ls(self._path(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(posixpath.basename(str(path).rstrip("/")) for path in found)

    def read(self, name: str) -> bytes | None:
        with _explained():
            try:
                return bytes(self.files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        with _explained(), self._opened(self._path(name)) as file:
            file.write(content)

    def put(self, folder: str, files: Mapping[str, Path], transfer: Transfer) -> None:
        for name, source in files.items():
            self._put(source, f"{folder}/{name}", transfer)

    def _put(self, source: Path, name: str, transfer: Transfer) -> None:
        size = source.stat().st_size
        with open(source, "rb") as reader:
            if size <= self.part_bytes:
                self._send(reader, self._path(name), size, transfer)
                return
            for number, start in enumerate(range(0, size, self.part_bytes)):
                count = min(self.part_bytes, size - start)
                part = self._path(f"{name}{PARTS}/{number:05d}")
                if self._size(part) != count:
                    reader.seek(start)
                    self._send(reader, part, count, transfer)

    def get(self, folder: str, names: Sequence[str], target: Path) -> None:
        for name in names:
            with open(target / name, "wb") as file:
                for chunk in self._chunks(f"{folder}/{name}"):
                    file.write(chunk)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        found = {}
        for name in names:
            digest = hashlib.sha256()
            with suppress(FileNotFoundError):
                for chunk in self._chunks(name):
                    digest.update(chunk)
                found[name] = digest.hexdigest()
        return found

    def remove(self, name: str) -> None:
        for path in (self._path(name), self._path(name + PARTS)):
            with _explained():
                try:
                    self.files.rm(path, recursive=True)
                except FileNotFoundError:
                    continue

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def _size(self, path: str) -> int | None:
        with _explained():
            try:
                return int(self.files.info(path)["size"])
            except FileNotFoundError:
                return None

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        """A file to write; folders are created for stores that have them."""
        try:
            file = self.files.open(path, "wb")
        except FileNotFoundError:
            self.files.makedirs(posixpath.dirname(path), exist_ok=True)
            file = self.files.open(path, "wb")
        with file:
            yield file

    def _send(self, reader: Any, path: str, count: int, transfer: Transfer) -> None:
        with _explained(), self._opened(path) as file:
            while count > 0 and (chunk := reader.read(min(CHUNK_BYTES, count))):
                transfer.spend(len(chunk))
                file.write(chunk)
                count -= len(chunk)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """The content of a file, whole or in parts; FileNotFoundError if it is neither."""
        parts = self.names(name + PARTS)
        paths = [self._path(f"{name}{PARTS}/{part}") for part in parts] or [self._path(name)]
        for path in paths:
            with _explained():
                try:
                    file = self.files.open(path, "rb")
                except FileNotFoundError:
                    raise _Missing(f"{path} is missing") from None
                with file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk


class _Missing(FileNotFoundError):
    """A file that the store does not hold, which is no failure of the store."""


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (StoreError, TransferCancelled, _Missing, GeneratorExit):
        raise
    except Exception as error:  # each store has errors of its own
        raise store_error(f"{type(error).__name__}: {error}") from error
