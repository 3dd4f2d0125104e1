"""Uniform random tokens, a function of the seed and the sample's number. No model reaches a loss below ln V on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.config import Config

TRAINING, VALIDATION = 0, 1


class SyntheticSamples:
    """The synthetic samples of one rank."""

    is_synthetic = True
    tokens_per_pass: int | None = None  # no two samples are the same

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.config = config
        self.fingerprint = f"synthetic-{config.train.seed}-{config.vocab_size}"
        self.description = f"synthetic: uniform random tokens below {config.vocab_size}"
        self._next = rank

    def take(self, count: int) -> npt.NDArray[np.int32]:
        numbers = range(self._next, self._next + count * self.world_size, self.world_size)
        self._next += count * self.world_size
        return np.stack([noise(self.config, TRAINING, number) for number in numbers])

    def state(self) -> dict[str, Any]:
        return {"kind": "synthetic", "fingerprint": self.fingerprint, "samples": self._next - self.rank}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["samples"] + self.rank


def noise(config: Config, split: int, number: int) -> npt.NDArray[np.int32]:
    """One sample. Philox is keyed by its number, so any sample is available at once."""
    key = np.array([config.train.seed, 2 * number + split], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.integers(0, config.vocab_size, config.train.seq_len + 1, dtype=np.int32)
