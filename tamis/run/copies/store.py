"""Places that hold copies of a run: the interface, the limits of a transfer, and the store that a URL names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

CHUNK_BYTES = 1 << 20
LONGEST_SLEEP_S = 0.2  # while an upload is throttled; then it looks whether it is still wanted
REMEDIES = {  # in the message of a store → what to do
    "No space left": "the store is full: free space there, or lower copy.keep",
    "quota": "the store is full: free space there, or lower copy.keep",
    "Permission denied (": "give this machine's SSH key to that account",
    "Permission denied": "the account may not write there",
    "Host key verification failed": "connect once by hand to accept the host's key",
    "credentials": "set the credentials of the store's own tool",
    "Access Key": "set the credentials of the store's own tool",
    "Forbidden": "set the credentials of the store's own tool",
    "rsync: command not found": "install rsync on both machines",
}


class StoreError(OSError):
    """A store that cannot be reached, is full or refuses; the message gives the remedy."""


class TransferCancelled(Exception):
    """An upload that stopped because something more urgent has to be uploaded."""


class Transfer:
    """Limits the speed of uploads, and ends one as soon as it is not wanted any more."""

    def __init__(self, max_mbps: float | None = None, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self.bytes_per_s = None if max_mbps is None else max_mbps * 1e6 / 8
        self.is_cancelled = is_cancelled
        self._free_at = 0.0  # monotonic; when the bytes of before have used up their time

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes are within the limit. Raises TransferCancelled."""
        now = time.monotonic()
        if self.bytes_per_s is not None:
            self._free_at = max(now, self._free_at) + count / self.bytes_per_s
        self.check()
        while (left := self._free_at - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_SLEEP_S))
            self.check()

    def check(self) -> None:
        if self.is_cancelled():
            raise TransferCancelled


class Store(Protocol):
    """Files under one address, by names with `/` between folders. Every method may raise StoreError."""

    def names(self, folder: str = "") -> list[str]:
        """The names of the files and folders in a folder; none if it is missing."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it is missing."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file: as a whole, or not at all."""
        ...

    def put(self, folder: str, files: Mapping[str, Path], transfer: Transfer) -> None:
        """Upload files by their names in a folder; what was cut short is continued where the store allows it.

        Each path ends with its name.
        """
        ...

    def get(self, folder: str, names: Sequence[str], target: Path) -> None:
        """Download files of a folder to the same names in `target`, whose folders exist. A missing one is an error."""
        ...

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """The sha256 of what the store holds, by name; without those that are missing."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file or a folder; one that is missing is fine."""
        ...


def open_store(url: str) -> Store:
    """The store at `file://`, `ssh://`, `[user@]host:path`, or any URL that fsspec reads. Connects to nothing yet."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "file":
        from tamis.run.copies.folder_store import FolderStore

        return FolderStore(Path(rest if rest.startswith("/") else f"/{rest.partition('/')[2]}"))
    if not separator or scheme == "ssh":
        from tamis.run.copies.ssh_store import SshStore

        return SshStore.at(url)
    from tamis.run.copies.fsspec_store import FsspecStore

    return FsspecStore(url)


def store_error(problem: object) -> StoreError:
    """The problem in one line, with the remedy for those that have one."""
    text = " ".join(str(problem).split())[:300] or type(problem).__name__
    remedy = next((words for sign, words in REMEDIES.items() if sign.lower() in text.lower()), None)
    return StoreError(f"{text} ({remedy})" if remedy else text)
