"""Documents of a Hugging Face dataset, streamed by `datasets`: file by file, row group by row group, one column only.

A record's number says its row group and row, so going on in the middle of a file reads nothing before that row group.
`data.hub_name` may also be a local folder laid out as a hub dataset, which goes through the same code.
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
from typing import Any, TypeVar
from urllib.parse import urlparse
from urllib.request import getproxies

from tamis.config import Data
from tamis.data.errors import DataError
from tamis.data.files import ROWS_PER_BATCH, Record, check_column, column_records
from tamis.data.waiting import RETRY_PAUSES_S, within

ROWS_PER_GROUP_LIMIT = 2**32
REMEDY = (
    "check the network, point HF_DATASETS_CACHE to a fast local disk, or use local files "
    "(data.dataset: fineweb_edu_local with data.local_path)"
)

T = TypeVar("T")


@functools.lru_cache(maxsize=1)  # training and validation share one listing
def open_hub(data: Data) -> HubDataset:
    """The dataset that `data.hub_name` names, or a DataError soon."""
    if not Path(data.hub_name).is_dir():
        _check_host()
    return within(data.loader_timeout_s, f"the file list of {data.hub_name}", lambda: HubDataset(data))


class HubDataset:
    """The train split of one dataset and subset."""

    def __init__(self, data: Data) -> None:
        self.sizes: list[int] = []  # not known before reading
        self._pauses_s = () if Path(data.hub_name).is_dir() else RETRY_PAUSES_S
        builder, dataset = _stream(data)
        self._dataset = dataset.with_format("arrow")
        self._urls = [str(url) for url in builder.config.data_files["train"]]
        self.names = [re.sub(r"^.*@[0-9a-f]{40}/", "", url) for url in self._urls]

    @property
    def identity(self) -> list[list[str | int]]:
        return [[url] for url in self._urls]  # on the hub they hold the commit of the dataset

    def place(self, file: int, number: int) -> str:
        group, row = divmod(number, ROWS_PER_GROUP_LIMIT)
        return f"{self.names[file]}, row group {group}, row {row}"

    def read(self, file: int, start: int = 0) -> Iterator[tuple[int, Record]]:
        """The records of one file with their numbers, from number `start` on."""
        groups = self._row_groups(file)
        first, row = divmod(start, ROWS_PER_GROUP_LIMIT)
        for group in range(first, groups.num_shards):
            yield from self._read_group(groups.shard(groups.num_shards, group), file, group, row)
            row = 0

    def _row_groups(self, file: int) -> Any:
        for attempt in range(len(self._pauses_s) + 1):
            try:
                return self._dataset.shard(len(self.names), file).reshard()
            except _failures() as error:
                self._pause_or_give_up(attempt, self.names[file], error)
        raise AssertionError("the last attempt raises")

    def _read_group(self, rows: Any, file: int, group: int, row: int) -> Iterator[tuple[int, Record]]:
        """The rows of one row group; when reading fails it is tried again from the row that was to come next."""
        attempt = 0
        while True:
            try:
                for record in _records(rows, row):
                    yield group * ROWS_PER_GROUP_LIMIT + row, record
                    row, attempt = row + 1, 0
                return
            except _failures() as error:
                self._pause_or_give_up(attempt, self.place(file, group * ROWS_PER_GROUP_LIMIT + row), error)
                attempt += 1

    def _pause_or_give_up(self, attempt: int, what: str, error: Exception) -> None:
        lasting = isinstance(
            error, FileNotFoundError | ValueError
        )  # Arrow's ArrowInvalid, a damaged file, is a ValueError
        if lasting or attempt >= len(self._pauses_s):
            raise DataError(f"{what} cannot be read ({_first_line(error)}): {REMEDY}") from error
        time.sleep(self._pauses_s[attempt])


def _stream(data: Data) -> tuple[Any, Any]:
    """Builder and streamed train split; the hub client makes its own attempts here."""
    import datasets

    datasets.disable_progress_bars()
    wanted = data.hub_subset if _has_subset(data) else None
    where = f"{data.hub_name} {data.hub_subset}"
    try:
        builder = datasets.load_dataset_builder(
            data.hub_name, wanted, revision=data.hub_revision, columns=[data.text_column]
        )
        dataset = builder.as_streaming_dataset(split="train")
    except _failures() as error:
        raise DataError(f"{where} cannot be opened ({_first_line(error)}): {REMEDY}") from error
    check_column(data.text_column, list(dataset.features or []), where)
    return builder, dataset


def _has_subset(data: Data) -> bool:
    """False for a plain folder of files, which has no subsets; a hub dataset has its own word on it."""
    import datasets

    if not Path(data.hub_name).is_dir():
        return True
    return data.hub_subset in datasets.get_dataset_config_names(data.hub_name)


def _records(rows: Any, start: int) -> Iterator[Record]:
    position = 0
    for table in rows.iter(batch_size=ROWS_PER_BATCH):
        if position + len(table) > start:
            yield from column_records(table.column(0)[max(0, start - position) :])
        position += len(table)


def _check_host() -> None:
    """Whether the hub's name resolves: the usual trouble, told in seconds instead of a client's minute of attempts."""
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
    """What reading from afar may raise; of a network library only when it is loaded, else it raised nothing."""
    names = (("httpx", "HTTPError"), ("aiohttp", "ClientError"))
    return OSError, ValueError, *(getattr(sys.modules[m], name) for m, name in names if m in sys.modules)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
