"""The loader: batches prepared ahead in a background thread, each with the exact position that follows it.

A late batch, or data that fails or ends, is a DataError. Random tokens replace data only if the config asks for it.

Every document begins with an end-of-text token, so the boundaries for `data.packing: documents` follow from the tokens:
both packings read the same rows in the same order, fill them completely and lose no token. A document that does not fit
is cut at the row's end, and its rest counts as a document of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.data.errors import DataError
from tamis.data.synthetic import SyntheticSamples

FETCH_TIMES_KEPT = 200
LONGEST_WAIT_S = 0.5
CLOSE_WAIT_S = 2.0  # a thread blocked in a read is abandoned after this
# Mean tokens per document that the offsets of a micro-batch have room for: the first that fits. Room costs time.
MEAN_TOKENS = (1024, 128, 8)


class Samples(Protocol):
    """One rank's samples in their fixed order."""

    is_synthetic: bool
    fingerprint: str
    tokens_per_pass: int | None  # training tokens, about; None: not known before reading

    @property
    def description(self) -> str: ...

    def take(self, count: int) -> npt.NDArray[np.int32]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Batch:
    tokens: npt.NDArray[np.int32]  # [accumulate_grad_batches, batch_size, seq_len + 1], or more and shorter rows
    fetch_s: float  # seconds the caller waited for it
    cu_seqlens: npt.NDArray[np.int32] | None = None  # [accumulate_grad_batches, documents + 1] of packed documents

    def lengths(self) -> list[int]:
        """Tokens of each packed document; without packing of each row, all of one length."""
        if self.cu_seqlens is None:
            return [self.tokens.shape[-1] - 1]
        lengths = np.diff(self.cu_seqlens)
        return lengths[lengths > 0].tolist()


class Loader:
    """Batches of one rank; `state` follows the batches returned, not those prepared ahead."""

    def __init__(self, config: Config, samples: Samples, rank: int, world_size: int) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.fingerprint = samples.fingerprint  # of the configured data, even if noise replaces it
        self.length = config.train.seq_len  # tokens of the rows returned; a divisor of it cuts them
        self._samples = samples
        self._state = samples.state()
        self._substituted = ""  # why noise replaced the data
        self._fetch_times: deque[float] = deque(maxlen=FETCH_TIMES_KEPT)
        self._producer: _Producer | None = None

    @property
    def is_synthetic(self) -> bool:
        return self._samples.is_synthetic

    @property
    def tokens_per_pass(self) -> int | None:
        return self._samples.tokens_per_pass

    @property
    def description(self) -> str:
        substituted = f" IN PLACE OF {self.config.data.dataset} ({self._substituted})" if self._substituted else ""
        return self._samples.description + substituted

    def next(self) -> Batch:
        """Return the next batch of this rank."""
        began = time.perf_counter()
        try:
            tokens, self._state = self._fetch()
        except DataError as error:
            if self.is_synthetic or not self.config.data.synthetic_on_fail:
                raise
            self.substitute_noise(str(error))
            tokens, self._state = self._fetch()
        fetch_s = time.perf_counter() - began
        self._fetch_times.append(fetch_s)
        train = self.config.train
        tokens = tokens.reshape(train.accumulate_grad_batches, train.batch_size, -1)
        tokens = cut_rows(tokens, self.length)
        if self.config.data.packing == "stream":
            return Batch(tokens, fetch_s)
        end_of_text = self.config.vocab_size - 1
        return Batch(tokens, fetch_s, stacked_offsets(tokens, end_of_text))

    def state(self) -> dict[str, Any]:
        """The position after the last returned batch, as JSON data."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a position of `state` or `merge_states`; only before the first batch."""
        if self._producer:
            raise RuntimeError("restore comes before the first batch")
        if state.get("kind") == "synthetic" and not self.is_synthetic:
            if not self.config.data.synthetic_on_fail:
                raise DataError(
                    "the checkpoint was trained on noise that replaced the data (data.synthetic_on_fail): "
                    "resume from an earlier one, or set data.synthetic_on_fail: true to continue with noise"
                )
            self.substitute_noise("as before the resume")
        if state.get("fingerprint") != self._samples.fingerprint:
            raise DataError(
                f"the checkpoint's position belongs to other data ({state.get('fingerprint')}, here "
                f"{self._samples.fingerprint}): restore the files and the data.* keys and train.seed it was made with"
            )
        self._samples.restore(state)
        self._state = state

    def fetch_percentiles(self) -> tuple[float, float]:
        """Median and 95th percentile of the last waits, in seconds."""
        if not self._fetch_times:
            return 0.0, 0.0
        p50, p95 = np.percentile(self._fetch_times, [50, 95])
        return float(p50), float(p95)

    def substitute_noise(self, reason: str) -> None:
        """Continue with random tokens from the same sample number; the description names the reason."""
        self.close()
        noise = SyntheticSamples(self.config, self.rank, self.world_size)
        noise.restore({"samples": self._state["samples"]})
        self._samples, self._state, self._substituted, self._producer = noise, noise.state(), reason, None

    def close(self) -> None:
        if self._producer:
            self._producer.close()

    def _fetch(self) -> tuple[npt.NDArray[np.int32], dict[str, Any]]:
        if not self._producer:
            self._producer = _Producer(self.config, self._samples)
        return self._producer.get()


class _Producer:
    """The background thread and the queue it fills."""

    def __init__(self, config: Config, samples: Samples) -> None:
        self._samples, self._timeout_s = samples, config.data.loader_timeout_s
        self._count = config.train.accumulate_grad_batches * config.train.batch_size
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=config.data.prefetch_batches)
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._produce, name="tamis-loader", daemon=True)
        self._thread.start()

    def get(self) -> tuple[npt.NDArray[np.int32], dict[str, Any]]:
        if self._failure:
            raise self._failure
        item = self._wait()
        if isinstance(item, Exception):
            self._failure = item
            raise item
        return item

    def _wait(self) -> Any:
        """The next item. Waits for short times: a signal that comes just before a wait is handled after it."""
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=min(left, LONGEST_WAIT_S))
        return DataError(
            f"no batch within {self._timeout_s:g} s: check the network or the disk the data is on, "
            "or raise data.loader_timeout_s (--loader-timeout)"
        )

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_WAIT_S)

    def _produce(self) -> None:
        try:
            while not self._closed.is_set():
                tokens = self._samples.take(self._count)
                self._put((tokens, self._samples.state()))
        except Exception as error:  # carried to the caller's thread, where it is raised
            self._put(error)

    def _put(self, item: object) -> None:
        while not self._closed.is_set():
            try:
                return self._ready.put(item, timeout=0.2)
            except queue.Full:
                continue


def cut_rows(tokens_ABS1: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int32]:
    """Cut rows of S + 1 tokens into rows of `length` + 1; each token stays a target once."""
    if tokens_ABS1.shape[-1] == length + 1:
        return tokens_ABS1
    windows = np.lib.stride_tricks.sliding_window_view(tokens_ABS1, length + 1, axis=-1)
    return windows[:, :, ::length].reshape(len(tokens_ABS1), -1, length + 1)


def document_offsets(tokens: npt.NDArray[np.int32], end_of_text: int) -> npt.NDArray[np.int32]:
    """`cu_seqlens`, int32, of a micro-batch `[rows, seq_len + 1]` read as one long row.

    Offsets count input tokens, of which each row has `seq_len`. They begin with 0 and are padded with rows · seq_len to
    one of few sizes, so that almost every batch has the same.
    """
    rows, seq_len = tokens.shape[0], tokens.shape[1] - 1
    begins = tokens[:, :-1] == end_of_text
    begins[:, 0] = True
    starts = np.flatnonzero(begins)
    rooms = [rows * (1 + seq_len // mean) for mean in MEAN_TOKENS]
    room = next((room for room in rooms if room >= len(starts)), None)
    if room is None:
        raise DataError(
            f"a micro-batch holds {len(starts):,} documents, and data.packing: documents has room for {rooms[-1]:,}: "
            f"remove documents of fewer than {MEAN_TOKENS[-1]} tokens, or set data.packing: stream"
        )
    return np.pad(np.append(starts, rows * seq_len), (0, room - len(starts)), mode="edge").astype(np.int32)


def stacked_offsets(tokens: npt.NDArray[np.int32], end_of_text: int) -> npt.NDArray[np.int32]:
    """The offsets of several micro-batches `[A, rows, seq_len + 1]`, of one size."""
    offsets = [document_offsets(rows, end_of_text) for rows in tokens]
    size = max(map(len, offsets))
    return np.stack([np.pad(each, (0, size - len(each)), mode="edge") for each in offsets])
