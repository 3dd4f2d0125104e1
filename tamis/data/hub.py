"""Documents of a Hugging Face dataset: `datasets` lists its files, and one column of each is streamed in turn.

Network failures are retried. A resume inside a file reads from the row group it needs. `data.hub_name` may also be a
local folder laid out as a hub dataset.

If HF_DATASETS_CACHE is set, what is read is kept there in blocks, up to `data.cache_gib`: a restart reads the disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlparse
from urllib.request import getproxies

from tamis.config import Data
from tamis.data.errors import DataError
from tamis.data.local_files import Record, check_column, parquet_records

RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts when the network fails; then it is an error
REMEDY = (
    "check the network, point HF_DATASETS_CACHE to a fast local disk, or use local files "
    "(data.dataset: local with data.local_path)"
)

BLOCK_BYTES = 4 * 2**20  # of the cache


@functools.lru_cache(maxsize=1)  # training and validation share one listing
def open_hub(data: Data) -> HubDataset:
    """Open the dataset of `data.hub_name`; a DataError within seconds if the hub cannot be reached."""
    if not Path(data.hub_name).is_dir():
        _check_host()
    return HubDataset(data)


class HubDataset:
    """The train split of one dataset and subset."""

    def __init__(self, data: Data) -> None:
        self.sizes: list[int] = []  # not known before reading
        self._pauses_s = () if Path(data.hub_name).is_dir() else RETRY_PAUSES_S
        self._text_column = data.text_column
        self._cache = None if Path(data.hub_name).is_dir() else _block_cache(data)
        self._urls = _train_files(data)
        self.names = [re.sub(r"^.*@[0-9a-f]{40}/", "", url) for url in self._urls]

    @property
    def identity(self) -> list[list[str | int]]:
        return [[url] for url in self._urls]  # on the hub they hold the commit of the dataset

    def place(self, file: int, number: int) -> str:
        return f"{self.names[file]}:{number + 1}"

    def read(self, file: int, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Yield the records of one file with their numbers; after a failure, continue with the next record."""
        number, attempt = start, 0
        while True:
            try:
                for record in self._records(file, number):
                    yield number, record
                    number, attempt = number + 1, 0
                return
            except _failures() as error:
                self._pause_or_give_up(attempt, self.place(file, number), error)
                attempt += 1

    def _records(self, file: int, start: int) -> Iterator[Record]:
        # The iterator of `datasets` starts threads that abort a process which ends in the middle of a file.
        from datasets.utils.file_utils import xopen  # retries after a lost connection

        url = self._urls[file]
        content: Any = CachedFile(self._cache, url, lambda: xopen(url, "rb")) if self._cache else xopen(url, "rb")
        with content:
            yield from parquet_records(content, self._text_column, start, self.names[file])

    def _pause_or_give_up(self, attempt: int, what: str, error: Exception) -> None:
        lasting = isinstance(error, FileNotFoundError | ValueError)  # a damaged file is Arrow's kind of ValueError
        if lasting or attempt >= len(self._pauses_s):
            raise DataError(f"{what} cannot be read ({_first_line(error)}): {REMEDY}") from error
        time.sleep(self._pauses_s[attempt])


def _block_cache(data: Data) -> BlockCache | None:
    """The cache in HF_DATASETS_CACHE; None if the variable is not set or the cache is off."""
    folder = os.environ.get("HF_DATASETS_CACHE")
    if not folder or not data.cache_gib:
        return None
    try:
        return BlockCache(Path(folder) / "tamis_blocks", int(data.cache_gib * 2**30))
    except OSError as error:
        raise DataError(f"HF_DATASETS_CACHE={folder} cannot be written ({error}): name another folder") from error


def _train_files(data: Data) -> list[str]:
    """The URLs of the train split's files; the hub client retries by itself here."""
    try:
        import datasets
    except ImportError:
        raise DataError("data.dataset fineweb_edu needs the package datasets: pip install datasets") from None
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # else it loads torch (2 s) into processes that only read text
    wanted = data.hub_subset if _has_subset(data) else None
    where = f"{data.hub_name} {data.hub_subset}"
    try:
        builder = datasets.load_dataset_builder(
            data.hub_name, wanted, revision=data.hub_revision, columns=[data.text_column]
        )
        columns = list(builder.as_streaming_dataset(split="train").features or [])
    except _failures() as error:
        raise DataError(f"{where} cannot be opened ({_first_line(error)}): {REMEDY}") from error
    check_column(data.text_column, columns, where)
    urls = [str(url) for url in builder.config.data_files["train"]]
    if not all(url.endswith(".parquet") for url in urls):
        raise DataError(f"{where} is not all parquet files: download it and use data.dataset: local")
    return urls


def _has_subset(data: Data) -> bool:
    """False for a plain folder of files; a hub dataset checks the subset itself."""
    import datasets

    if not Path(data.hub_name).is_dir():
        return True
    return data.hub_subset in datasets.get_dataset_config_names(data.hub_name)


def _check_host() -> None:
    """Check in seconds that the hub's name resolves; the client would retry for a minute."""
    if getproxies():
        return  # the proxy resolves it
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    for pause_s in (1.0, 2.0, 0.0):
        try:
            socket.getaddrinfo(host, 443)
            return
        except OSError as error:
            problem = error
        time.sleep(pause_s)
    raise DataError(f"the hub {host} cannot be reached ({problem}): {REMEDY}")


def _failures() -> tuple[type[Exception], ...]:
    """Exceptions of remote reads, including those of network libraries that are loaded."""
    names = (("httpx", "HTTPError"), ("httpx2", "HTTPError"), ("aiohttp", "ClientError"))
    return OSError, ValueError, *(getattr(sys.modules[m], name) for m, name in names if m in sys.modules)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class BlockCache:
    """A folder of blocks with a size limit, which all processes that share it keep together."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self._most = folder, most_bytes
        self.folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / f"{name}.block").read_bytes()
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Store a block if it fits; a disk that is full only means that it is not stored."""
        scratch = self.folder / f"{name}.{os.getpid()}.tmp"
        with contextlib.suppress(OSError):
            if self._used() + len(content) > self._most:
                return
            scratch.write_bytes(content)
            scratch.replace(self.folder / f"{name}.block")
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)

    def _used(self) -> int:
        """Count what is there now: other ranks write here too. A block is downloaded in more time than this takes."""
        used = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a scratch file that was put in place just now
                    used += entry.stat(follow_symlinks=False).st_size
        return used


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
