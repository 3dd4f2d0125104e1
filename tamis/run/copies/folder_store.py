"""A store in a folder of this machine: another disk, or a mounted network share (`file:///path`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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

    def put(self, source: Path, name: str, transfer: Transfer) -> None:
        target = self.folder / name
        partial = target.with_name(f"{target.name}.part")
        with open(source, "rb") as reader, _explained():
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "ab") as writer:
                reader.seek(writer.tell())
                while chunk := reader.read(CHUNK_BYTES):
                    transfer.spend(len(chunk))
                    writer.write(chunk)
                writer.flush()
                os.fsync(writer.fileno())
            os.replace(partial, target)
            sync_directory(target.parent)

    def get(self, name: str, target: Path) -> None:
        with _explained():
            shutil.copyfile(self.folder / name, target)

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
