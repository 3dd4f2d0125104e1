"""Documents of a Hugging Face dataset: `datasets` lists its files, and one column of each is streamed in turn.

Network failures are retried. A resume inside a file reads from the row group it needs. `data.hub_name` may also be a
local folder laid out as a hub dataset.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

from tamis.config import Data
from tamis.data.block_cache import BlockCache, CachedFile
from tamis.data.errors import DataError
from tamis.data.local_files import Record, check_column, parquet_records

RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts when the network fails; then it is an error
REMEDY = (
    "check the network, point HF_DATASETS_CACHE to a fast local disk, or use local files "
    "(data.dataset: local with data.local_path)"
)


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
