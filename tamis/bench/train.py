"""`tamis bench train`: times the training step of an NSA model and of its dense twin, in one run.

Measures tokens per second, MFU, step-time percentiles and peak memory, on tokens in memory and with the data loader.
Prints a table, then one JSON document.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tamis.bench.document import begin_document, kept_when_interrupted
from tamis.bench.sizes import print_other_tokens, sequences_in
from tamis.config import Config, build_config
from tamis.config.size import parameter_count
from tamis.train.distributed import choose_device
from tamis.train.mfu import Utilisation
from tamis.train.tools.probe import Measurement, NextTokens, Probe, random_batches
from tamis.train.tools.selfcheck import require_right_attention


def measure_training(
    config: Config, lengths: list[int], tokens: int, steps: int, warmup: int, with_data: bool
) -> dict[str, Any]:
    """Measure both kinds of attention at each length; print the table and return the document."""
    device = choose_device(config, 0)
    rows: list[dict[str, Any]] = []
    document = begin_document("train", device)
    document |= {"tokens_per_step": tokens, "precision": config.runtime.precision, "rows": rows}
    print(f"{config.model.name} on {document['device']}, {config.runtime.precision}, {tokens:,} tokens per step")
    print_other_tokens(tokens, lengths)
    print(f"{'length':>7} {'attention':>9} {'data':>6} {'tok/s':>10} {'MFU':>6} {'p50 ms':>8} {'p95 ms':>8} {'GiB':>6}")
    sources = ("none", "shards") if with_data else ("none",)
    with kept_when_interrupted(document):
        for length in lengths:
            for attention in ("dense", "nsa"):
                for row in _measured(_shaped(config, attention, length, tokens), device, steps, warmup, sources):
                    rows.append(row)
                    _print_row(row)
    return document


def _shaped(config: Config, attention: str, length: int, tokens: int) -> Config:
    tree = config.model_dump()
    tree["model"]["attention"] = attention
    tree["train"] |= {"seq_len": length, "batch_size": sequences_in(tokens, length), "accumulate_grad_batches": 1}
    return build_config(tree)


def _measured(
    config: Config, device: torch.device, steps: int, warmup: int, sources: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each token source, all measured on one model, so that only the source differs."""
    require_right_attention(config, device)  # the speed of wrong kernels is no result
    torch._dynamo.reset()
    probe = Probe(config, device)
    for source in sources:
        with _batches(config, source) as next_tokens:
            yield _row(config, device, source, probe.measure(next_tokens, steps, warmup))


def _row(config: Config, device: torch.device, source: str, measured: Measurement) -> dict[str, Any]:
    rate = measured.tokens_per_s(config)
    return {
        "length": config.train.seq_len,
        "attention": config.model.attention,
        "data": source,
        "tokens_per_step": config.tokens_per_step(1),
        "parameters": parameter_count(config),
        "toks_per_s": round(rate),
        "mfu": Utilisation(config, device).at(rate, [config.train.seq_len]),
        "step_p50_ms": round(measured.percentile_ms(50), 3),
        "step_p95_ms": round(measured.percentile_ms(95), 3),
        "first_step_s": round(measured.first_step_s, 1),
        "peak_gib": measured.peak_gib,
    }


@contextlib.contextmanager
def _batches(config: Config, source: str) -> Iterator[NextTokens]:
    """Yield a function that returns tokens from memory, or from the loader over prepared shards of the sample."""
    if source == "none":
        yield random_batches(config).__next__
        return
    from tamis.data import open_loader
    from tamis.data.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        prepare(_with_data(config, dataset="sample"), folder)
        loader = open_loader(_with_data(config, dataset="shards", local_path=folder, epochs=None))
        yield lambda: loader.next().tokens
        loader.close()


def _with_data(config: Config, **keys: Any) -> Config:
    tree = config.model_dump()
    tree["data"] |= keys
    return build_config(tree)


def _print_row(row: dict[str, Any]) -> None:
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    print(
        f"{row['length']:>7} {row['attention']:>9} {row['data']:>6} {row['toks_per_s']:>10,} {mfu:>6} "
        f"{row['step_p50_ms']:>8.1f} {row['step_p95_ms']:>8.1f} {peak:>6}",
        flush=True,
    )
