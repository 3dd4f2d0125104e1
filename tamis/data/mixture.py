"""Several sources mixed by weight: deterministic, the same for every number of processes, and resumable at any sample.

Samples are grouped in blocks of `data.lanes`, and each block comes from one source: always the one that is furthest
behind its weight. Lanes are a multiple of every number of processes, so a rank serves the same share of each source's
samples as of the mixture's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.data.errors import EndOfData
from tamis.data.loader import Samples
from tamis.data.shards import MANIFEST
from tamis.data.stream import check_lanes

BY_NAME = ("fineweb_edu", "sample")  # sources that are no path
BLOCKS_KEPT = 8  # a rank's samples are never further ahead of the mixture's position

OpenSamples = Callable[[Config, int, int], Samples]


def source_configs(config: Config) -> dict[str, Config]:
    """The configuration of each source of `data.mixture`, by its name or path."""
    return {name: _source_config(config, name) for name in config.data.mixture or {}}


def _source_config(config: Config, name: str) -> Config:
    if name in BY_NAME:
        keys: dict[str, Any] = {"dataset": name}
    else:
        keys = {"dataset": "shards" if (Path(name) / MANIFEST).is_file() else "local", "local_path": name}
    return config.model_copy(update={"data": config.data.model_copy(update={**keys, "mixture": None})})


class Turns:
    """Which source each block comes from; `before` counts the blocks of each source before it."""

    def __init__(self, weights: list[float], block: int = 0, before: list[int] | None = None) -> None:
        self.shares = np.array(weights) / sum(weights)
        self._blocks = {block: (before or [0] * len(weights))}

    def source(self, block: int) -> int:
        """The source of a block: the one furthest behind its weight, the first of equals."""
        lag = self.shares * (block + 1) - np.array(self.before(block))
        return int(np.argmax(np.round(lag, 9)))

    def before(self, block: int) -> list[int]:
        """Blocks of each source before this one; at most a few blocks back from the furthest asked for."""
        for known in range(max(self._blocks), block):
            counts = list(self._blocks[known])
            counts[self.source(known)] += 1
            self._blocks[known + 1] = counts
        for old in [known for known in self._blocks if known < max(self._blocks) - BLOCKS_KEPT]:
            del self._blocks[old]
        return self._blocks[block]


class MixtureSamples:
    """This rank's samples of a mixture."""

    is_synthetic = False

    def __init__(self, config: Config, open_samples: OpenSamples, rank: int, world_size: int) -> None:
        check_lanes(config, world_size)
        self.rank, self.world_size, self._lanes = rank, world_size, config.data.lanes
        self._configs, self._open = source_configs(config), open_samples
        self._weights = list((config.data.mixture or {}).values())
        self._turns, self._next = Turns(self._weights), rank
        self._sources = [open_samples(one, rank, world_size) for one in self._configs.values()]
        what = [self._turns.shares.round(9).tolist(), [source.fingerprint for source in self._sources], self._lanes]
        self.fingerprint = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        passes = [
            source.tokens_per_pass / share if source.tokens_per_pass else None
            for source, share in zip(self._sources, self._turns.shares, strict=True)
        ]
        self.tokens_per_pass = None if None in passes else int(min(filter(None, passes)))  # of the first that repeats

    @property
    def description(self) -> str:
        parts = zip(self._turns.shares, self._configs, self._sources, strict=True)
        return "mixture: " + "; ".join(f"{share:.1%} {name} ({source.description})" for share, name, source in parts)

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """The next `count` samples of this rank, [count, seq_len + 1]."""
        rows = [self._sample(self._next + i * self.world_size) for i in range(count)]
        self._next += count * self.world_size
        return np.stack(rows)

    def _sample(self, number: int) -> npt.NDArray[np.int32]:
        source = self._turns.source(number // self._lanes)
        try:
            return self._sources[source].take(1)[0]
        except EndOfData as error:
            name = list(self._configs)[source]
            raise EndOfData(f"{name} of data.mixture: {error}, or lower its weight") from None

    def state(self) -> dict[str, Any]:
        number = self._next - self.rank
        block, inside = divmod(number, self._lanes)
        before, current = self._turns.before(block), self._turns.source(block)
        used = [self._lanes * count + (inside if i == current else 0) for i, count in enumerate(before)]
        states = [{**source.state(), "samples": n} for source, n in zip(self._sources, used, strict=True)]
        return {
            "kind": "mixture",
            "fingerprint": self.fingerprint,
            "samples": number,
            "blocks": before,
            "sources": states,
        }

    def restore(self, state: dict[str, Any]) -> None:
        number = state["samples"]
        self._next = number + self.rank
        self._turns = Turns(self._weights, number // self._lanes, state["blocks"])
        self._sources = []
        for config, position in zip(self._configs.values(), state["sources"], strict=True):
            # Another number of processes may begin inside a round: then a source's shares are shifted against ours.
            rank = (self.rank + number - position["samples"]) % self.world_size
            source = self._open(config, rank, self.world_size)
            source.restore(position)
            self._sources.append(source)


def merge_mixture_states(
    states: list[dict[str, Any]], merge: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Join the positions of all ranks, source by source."""
    by_source = zip(*(state["sources"] for state in states), strict=True)
    return {**states[0], "sources": [merge(list(of_source)) for of_source in by_source]}


def mixed_rows(config: Config, rows_of: Callable[[Config, int], list[npt.NDArray[np.int32]]], wanted: int) -> list[Any]:
    """Held-out rows of every source in the order of the weights; a source with too few gives what it has."""
    turns = Turns(list((config.data.mixture or {}).values()))
    order = [turns.source(number) for number in range(wanted)]
    sources = [iter(rows_of(one, order.count(i))) for i, one in enumerate(source_configs(config).values())]
    drawn = (next(sources[source], None) for source in order)
    return [row for row in drawn if row is not None]
