"""A store in a folder of this machine: another disk, or a mounted network share (`file:///path`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tamis.run.copies.store import CHUNK_BYTES, Transfer, store_error
from tamis.run.files.manifest import sha256_of
from tamis.run.files.records import sync_directory, write_atomic


class FolderStore:
    """See `Store`. An upload that was cut short leaves NAME.part, which the next one continues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self, folder: str = "") -> list[str]:
        with _explained():
            path = self.folder / folder
            return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def read(self, name: str) -> bytes | None:
        with _explained():
            path = self.folder / name
            return path.read_bytes() if path.is_file() else None

    def write(self, name: str, content: bytes) -> None:
        with _explained():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, lambda file: file.write(content))

    def put(self, folder: str, files: Mapping[str, Path], transfer: Transfer) -> None:
        for name, source in files.items():
            with open(source, "rb") as reader, _explained():
                self._put(reader, self.folder / folder / name, transfer)

    def _put(self, reader: IO[bytes], target: Path, transfer: Transfer) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.part")
        is_small = os.fstat(reader.fileno()).st_size <= CHUNK_BYTES  # and may have changed since it was cut
        with open(partial, "wb" if is_small else "ab") as writer:
            reader.seek(writer.tell())
            while chunk := reader.read(CHUNK_BYTES):
                transfer.spend(len(chunk))
                writer.write(chunk)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(partial, target)
        sync_directory(target.parent)

    def get(self, folder: str, names: Sequence[str], target: Path) -> None:
        with _explained():
            for name in names:
                shutil.copyfile(self.folder / folder / name, target / name)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        with _explained():
            return {name: sha256_of(self.folder / name) for name in names if (self.folder / name).is_file()}

    def remove(self, name: str) -> None:
        path = self.folder / name
        with _explained():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
                path.with_name(f"{path.name}.part").unlink(missing_ok=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise store_error(f"{error.strerror or error}: {error.filename or 'copy.to'}") from error
