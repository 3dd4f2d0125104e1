"""`tamis bench train`: the real training step of a model with NSA and of its dense twin, in one run.

Tokens per second, MFU, step-time percentiles and peak memory, first on tokens that lie ready, then with the loader.
A table for people first; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tamis.config import Config, build_config, load_config
from tamis.model import Decoder
from tamis.size import parameter_count
from tamis.train.distributed import Workers, choose_device
from tamis.train.peak import Utilisation
from tamis.train.step import TrainStep

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
TOKENS_PER_STEP = 65536
GIB = 1 << 30


def run(config: Config, lengths: list[int], tokens: int, steps: int, warmup: int, with_data: bool) -> dict[str, Any]:
    """Measure both kinds of attention at each length; prints the table as it grows, returns the document."""
    device = choose_device(config, 0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{config.model.name} on {name}, {config.runtime.precision}, {tokens:,} tokens per step")
    print(f"{'length':>7} {'attention':>9} {'data':>6} {'tok/s':>10} {'MFU':>6} {'p50 ms':>8} {'p95 ms':>8} {'GiB':>6}")
    rows = []
    for length in lengths:
        for attention in ("dense", "nsa"):
            shaped = _shaped(config, attention, length, tokens)
            for source in ("none", "shards") if with_data else ("none",):
                rows.append(_measure(shaped, device, steps, warmup, source))
                _print_row(rows[-1])
    return {"device": name, "tokens_per_step": tokens, "precision": config.runtime.precision, "rows": rows}


def _shaped(config: Config, attention: str, length: int, tokens: int) -> Config:
    tree = config.model_dump()
    tree["model"]["attention"] = attention
    tree["train"] |= {"seq_len": length, "batch_size": max(1, tokens // length), "accumulate_grad_batches": 1}
    return build_config(tree)


def _measure(config: Config, device: torch.device, steps: int, warmup: int, source: str) -> dict[str, Any]:
    torch.manual_seed(config.train.seed)
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    step = TrainStep(Decoder(config).to(device), config, Workers(0, 1, device))
    with _tokens(config, source) as next_tokens:
        step(next_tokens(), 1)
        _synchronise(device)
        first_step_s = time.perf_counter() - began
        times = _step_times(step, next_tokens, device, steps, warmup)
    seconds = float(np.sum(times)) / len(times)
    rate = config.tokens_per_step(1) / seconds
    return {
        "length": config.train.seq_len,
        "attention": config.model.attention,
        "data": source,
        "parameters": parameter_count(config),
        "toks_per_s": round(rate),
        "mfu": Utilisation(config, device).at(rate),
        "step_p50_ms": round(float(np.percentile(times, 50)) * 1e3, 3),
        "step_p95_ms": round(float(np.percentile(times, 95)) * 1e3, 3),
        "first_step_s": round(first_step_s, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 2) if device.type == "cuda" else None,
    }


def _step_times(
    step: TrainStep, next_tokens: Callable[[], np.ndarray], device: torch.device, steps: int, warmup: int
) -> list[float]:
    """Seconds per step, from one step's end to the next one's, without waiting in between."""
    marks: list[Any] = []
    for number in range(warmup + steps + 1):
        step(next_tokens(), number + 2)
        if number >= warmup:
            marks.append(_mark(device))
    _synchronise(device)
    if device.type == "cuda":
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return [b - a for a, b in itertools.pairwise(marks)]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _tokens:
    """Where the batches come from: ready in memory, or through the loader from prepared shards of the sample."""

    def __init__(self, config: Config, source: str) -> None:
        self.config, self.source = config, source

    def __enter__(self) -> Callable[[], np.ndarray]:
        if self.source == "none":
            train = self.config.train
            generator = np.random.default_rng(train.seed)
            shape = (4, 1, train.batch_size, train.seq_len + 1)
            ready = generator.integers(self.config.vocab_size, size=shape, dtype=np.int32)
            return _endless(ready).__next__
        from tamis.data import open_loader
        from tamis.data.prepare import prepare

        self._folder = tempfile.TemporaryDirectory()
        tree = self.config.model_dump()
        tree["data"] |= {"dataset": "sample", "epochs": None}
        prepare(build_config(tree), Path(self._folder.name))
        tree["data"] |= {"dataset": "shards", "local_path": self._folder.name}
        self._loader = open_loader(build_config(tree))
        return lambda: self._loader.next().tokens

    def __exit__(self, *_: object) -> None:
        if self.source != "none":
            self._loader.close()
            self._folder.cleanup()


def _endless(ready: np.ndarray) -> Iterator[np.ndarray]:
    while True:
        yield from ready


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print_row(row: dict[str, Any]) -> None:
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    print(
        f"{row['length']:>7} {row['attention']:>9} {row['data']:>6} {row['toks_per_s']:>10,} {mfu:>6} "
        f"{row['step_p50_ms']:>8.1f} {row['step_p95_ms']:>8.1f} {peak:>6}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tamis bench train", description=__doc__)
    parser.add_argument("--config", default="configs/m7c_125m_80g.yaml", help="model and runtime to measure")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens per sequence")
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_STEP, help="tokens per step")
    parser.add_argument("--steps", type=int, default=20, help="steps measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before that")
    parser.add_argument("--with-data", action="store_true", help="also measure with the loader, from prepared shards")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args(argv)
    config = load_config(arguments.config, arguments.overrides)
    document = run(config, arguments.lengths, arguments.tokens, arguments.steps, arguments.warmup, arguments.with_data)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
