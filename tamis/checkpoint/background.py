"""Saving in the background: a thread writes a copy of the state in host memory while training goes on.

There is one save at a time and one copy, whose memory every save uses again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

State = dict[str, Any]


class BackgroundSave:
    """Writes states with `write`, which gets a copy; the caller takes each result before it starts the next."""

    def __init__(self, write: Callable[[State], Path]) -> None:
        self._write = write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._copies: dict[tuple[str, ...], Tensor] = {}
        self._running: Future[Path] | None = None

    def start(self, state: State) -> None:
        """Copy the state, and write the copy."""
        assert self._running is None
        self._running = self._thread.submit(self._write, self._copied(state))

    @property
    def has_ended(self) -> bool:
        """Whether a result is there to be taken."""
        return self._running is not None and self._running.done()

    def result(self) -> Path:
        """Wait for the save under way; return the checkpoint it wrote, or raise its error."""
        assert self._running is not None
        running, self._running = self._running, None
        return running.result()

    def has_room(self, state: State) -> bool:
        """Whether host memory holds the copy, with as much to spare."""
        missing = sum(x.nbytes for path, x in _tensors(state) if not _is_like(self._copies.get(path), x))
        return 2 * missing <= psutil.virtual_memory().available

    def _copied(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(each, (*path, key)) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        kept = self._copies.get(path)
        if kept is None or not _is_like(kept, value):
            kept = self._copies[path] = torch.empty_like(value, device="cpu")
        return kept.copy_(value)


def _tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, (*path, key))


def _is_like(kept: Tensor | None, value: Tensor) -> bool:
    return kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype)
