"""Samples of streamed documents: documents are dealt to lanes, and each lane is one endless packed row of tokens.

Sample n comes from lane n % lanes, and rank r serves the samples n ≡ r modulo the world size. So a rank tokenises only
the documents of its own lanes, and the global order is the same for every world size that divides the lanes.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.data.errors import DataError, end_of_data
from tamis.data.local_files import COMPRESSED, PARQUET
from tamis.data.order import Cursor, Document, DocumentOrder, Source, Window, held_out_below
from tamis.data.tokenizer import TokenIds, Tokenizer, tokenizer_for, with_end_of_text


@dataclass
class Lane:
    """A row of packed tokens; its next sample begins at `offset` in `document`."""

    waiting: deque[tuple[int, str]]  # number and text of documents not yet tokenised
    tokens: deque[tuple[int, TokenIds]]  # number and tokens of documents in use
    document: int = 0
    offset: int = 0
    available: int = 0  # tokens ahead

    def accept(self, number: int, text: str) -> None:
        if number >= self.document:  # earlier ones were used before the resume
            self.waiting.append((number, text))

    def tokenize_next(self, tokenizer: Tokenizer) -> None:
        number, text = self.waiting.popleft()
        ids = with_end_of_text(tokenizer, text)
        if not self.tokens and number > self.document:  # the document of the stored position is not in this lane
            self.document, self.offset = number, 0
        self.tokens.append((number, ids))
        self.available += len(ids) - (self.offset if number == self.document else 0)

    def take(self, seq_len: int) -> npt.NDArray[np.int32]:
        """Take seq_len + 1 tokens; the last is also the next sample's first, so each token is a target once."""
        pieces, missing = [], seq_len + 1
        for index, (_, ids) in enumerate(self.tokens):
            piece = ids[self.offset if index == 0 else 0 :][:missing]
            pieces.append(piece)
            missing -= len(piece)
            if not missing:
                break
        self._advance(seq_len)
        return np.concatenate(pieces).astype(np.int32)

    def _advance(self, count: int) -> None:
        self.available -= count
        self.offset += count
        while self.offset >= len(self.tokens[0][1]):
            self.offset -= len(self.tokens.popleft()[1])
            self.document = self.tokens[0][0]


@dataclass
class Deal:
    """The state before a window is dealt; dealing from it again gives the same result."""

    start: Cursor
    document: int  # number of the window's first document, counted over all epochs
    loads: list[int]  # bytes dealt to each lane so far


BYTES_PER_TOKEN = 4  # of English text in byte pairs, about


def _tokens_per_pass(config: Config, source: Source) -> int | None:
    """Estimate the training tokens from the sizes of text files; None for compressed files and streams."""
    if not source.sizes or any(name.endswith((*PARQUET, *COMPRESSED)) for name in source.names):
        return None
    size = int(sum(source.sizes) * (1 - config.data.val_fraction))
    return size if config.data.tokenizer == "byte" else size // BYTES_PER_TOKEN


class StreamSamples:
    """This rank's samples of a document source."""

    is_synthetic = False

    def __init__(self, config: Config, source: Source, rank: int, world_size: int) -> None:
        check_lanes(config, world_size)
        self.rank, self.world_size = rank, world_size
        self.seq_len, self.epochs = config.train.seq_len, config.data.epochs
        self.tokenizer = tokenizer_for(config.data.tokenizer)
        self.order = document_order(config, source)
        self.tokens_per_pass = _tokens_per_pass(config, source)
        self.fingerprint = _fingerprint(config, source)
        files = "1 file" if len(source.names) == 1 else f"{len(source.names)} files"
        self._name = f"{config.data.dataset}: {files}, {config.data.tokenizer} tokens"
        self._lanes = config.data.lanes
        self._begin(0, Deal(Cursor(), 0, [0] * self._lanes), dict.fromkeys(range(self._lanes), (0, 0)))

    @property
    def description(self) -> str:
        skipped = self.order.skipped
        bad = f", {skipped.bad} unreadable records skipped (last: {skipped.last_bad})" if skipped.bad else ""
        return self._name + bad + (f", {skipped.empty} empty documents" if skipped.empty else "")

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """The next `count` samples of this rank, [count, seq_len + 1]."""
        rows = [self._sample(self._next + i * self.world_size) for i in range(count)]
        self._next += count * self.world_size
        return np.stack(rows)

    def state(self) -> dict[str, Any]:
        deal = self._deal_before(min(lane.document for lane in self._own.values()))
        return {
            "kind": "stream",
            "fingerprint": self.fingerprint,
            "samples": self._next - self.rank,
            "lanes": {str(i): [lane.document, lane.offset] for i, lane in self._own.items()},
            "deal": {"start": list(deal.start), "document": deal.document, "loads": list(deal.loads)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        deal = Deal(Cursor(*state["deal"]["start"]), state["deal"]["document"], list(state["deal"]["loads"]))
        positions = {int(i): tuple(position) for i, position in state["lanes"].items()}
        if not set(self._lanes_from(state["samples"])) <= set(positions):
            raise DataError("the position covers some lanes only: merge the positions of all ranks first")
        self._begin(state["samples"], deal, positions)

    def _begin(self, samples: int, deal: Deal, positions: dict[int, tuple[int, int]]) -> None:
        self._next = samples + self.rank
        self._own = {i: Lane(deque(), deque(), *positions[i]) for i in self._lanes_from(samples)}
        self._deals = deque([deal])
        self._windows = self._deal_windows(deal)

    def _lanes_from(self, samples: int) -> range:
        """This rank's lanes after `samples` samples, whatever world size used them."""
        return range((samples + self.rank) % self.world_size, self._lanes, self.world_size)

    def _sample(self, number: int) -> npt.NDArray[np.int32]:
        lane = self._own[number % self._lanes]
        while lane.available <= self.seq_len:
            while not lane.waiting:
                if next(self._windows, None) is None:
                    raise self._end(number)
            lane.tokenize_next(self.tokenizer)
        return lane.take(self.seq_len)

    def _deal_windows(self, deal: Deal) -> Iterator[Window]:
        """Deal windows: each document goes to the lane with the fewest bytes so far."""
        number, loads = deal.document, list(deal.loads)
        for window in self.order.windows(deal.start, self.epochs):
            self._deals.append(Deal(window.start, number, list(loads)))
            for document in window.documents:
                self._deal(number, document, loads)
                number += 1
            yield window

    def _deal(self, number: int, document: Document, loads: list[int]) -> None:
        lane = loads.index(min(loads))
        loads[lane] += document.size + 1  # and its end-of-text
        if lane in self._own:
            self._own[lane].accept(number, document.text)

    def _deal_before(self, document: int) -> Deal:
        while len(self._deals) > 1 and self._deals[1].document <= document:
            self._deals.popleft()
        return self._deals[0]

    def _end(self, number: int) -> DataError:
        if number < self._lanes:
            return DataError(
                f"the data holds too few documents for data.lanes: {self._lanes}; lower data.lanes, "
                "or set data.epochs: null to repeat the data"
            )
        return end_of_data(number, self.seq_len, self.epochs)


def merge_stream_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the positions of all ranks' lanes, and the earliest deal that any of them needs."""
    lanes = {lane: position for state in states for lane, position in state["lanes"].items()}
    return {**min(states, key=lambda state: state["deal"]["document"]), "lanes": lanes}


def document_order(config: Config, source: Source) -> DocumentOrder:
    below = held_out_below(source, config.data.val_fraction)
    return DocumentOrder(source, config.train.seed, below, skip_bad=config.data.on_bad_record == "skip")


def check_lanes(config: Config, world_size: int) -> None:
    if config.data.lanes % world_size:
        raise DataError(f"data.lanes is {config.data.lanes}: it must be a multiple of the {world_size} processes")


def held_out_tokens(config: Config, source: Source) -> Iterator[TokenIds]:
    """The tokens of each held-out document."""
    tokenizer = tokenizer_for(config.data.tokenizer)
    for document in document_order(config, source).held_out():
        yield with_end_of_text(tokenizer, document.text)


def _fingerprint(config: Config, source: Source) -> str:
    data = config.data
    tokenizer, seed = tokenizer_for(data.tokenizer).name, config.train.seed
    what = [source.identity, tokenizer, data.text_column, data.val_fraction, data.lanes, seed]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
