"""A short measurement of the real training step, for `tamis estimate` and the benchmarks."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tamis.attention.functional import Backend
from tamis.config import Config
from tamis.config.size import GIB
from tamis.model import Decoder
from tamis.train.distributed import Ranks
from tamis.train.metrics import seconds_between, timestamp
from tamis.train.step import TrainStep

NextTokens = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Measurement:
    step_s: list[float]  # from one step's end to the next one's
    first_step_s: float  # building the model, compiling, and the first step
    peak_gib: float | None  # None on a CPU

    def tokens_per_s(self, config: Config) -> float:
        """Return the rate of this one process."""
        return config.tokens_per_step(1) * len(self.step_s) / sum(self.step_s)

    def percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.step_s, percent)) * 1e3


class Probe:
    """A fresh model and its training step, built and compiled once, then measured on one or more token sources.

    With `ranks`, this process is one of them, and gradients are exchanged as in the run.
    """

    def __init__(
        self, config: Config, device: torch.device, ranks: Ranks | None = None, backend: Backend = "auto"
    ) -> None:
        if device.type == "cuda":
            gc.collect()  # a step and its graph form a cycle: an earlier one's memory would count as this one's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        torch.manual_seed(config.train.seed)
        self._device, self._steps_taken = device, 0
        self._step = TrainStep(Decoder(config, backend=backend).to(device), config, ranks or Ranks(0, 1, device))
        self._take_step(next(random_batches(config)))
        _synchronise(device)
        self._first_step_s = time.perf_counter() - began

    def measure(self, next_tokens: NextTokens, steps: int, warmup: int) -> Measurement:
        """Train for another `warmup + steps` steps, without waiting for the device between them."""
        stamps = []
        for number in range(warmup + steps + 1):
            self._take_step(next_tokens())
            if number >= warmup:
                stamps.append(timestamp(self._device))
        _synchronise(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) / GIB if self._device.type == "cuda" else None
        seconds = [seconds_between(a, b) for a, b in itertools.pairwise(stamps)]
        return Measurement(seconds, self._first_step_s, peak)

    def _take_step(self, tokens_ABS1: np.ndarray) -> None:
        self._steps_taken += 1
        self._step(tokens_ABS1, self._steps_taken)


def measure_steps(
    config: Config,
    device: torch.device,
    next_tokens: NextTokens,
    steps: int,
    warmup: int,
    ranks: Ranks | None = None,
    backend: Backend = "auto",
) -> Measurement:
    """Measure a fresh model on one source of tokens."""
    return Probe(config, device, ranks, backend).measure(next_tokens, steps, warmup)


def random_batches(config: Config) -> Iterator[np.ndarray]:
    """Yield uniform tokens from memory, so that the step is measured without the data."""
    train = config.train
    shape = (4, train.accumulate_grad_batches, train.batch_size, train.seq_len + 1)
    ready = np.random.default_rng(train.seed).integers(config.vocab_size, size=shape, dtype=np.int32)
    return itertools.cycle(ready)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
