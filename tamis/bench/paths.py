"""`tamis bench paths`: the same model and training step with each way to compute its attention, in one run.

The paths are the NSA kernels (on a GPU), the plain-PyTorch reference, and the dense twin. Prints a table, then JSON.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from tamis.attention.functional import Backend, why_no_kernels
from tamis.bench.document import begin_document, exit_code, kept_when_interrupted
from tamis.config import Config, build_config
from tamis.model import DTYPES, Decoder
from tamis.run.files.records import optional_write, write_json_atomic
from tamis.train.distributed import choose_device
from tamis.train.step import autocast
from tamis.train.tools.probe import measure_steps, random_batches
from tamis.train.tools.selfcheck import require_right_attention

RESULTS = Path("artifacts/bench")
BACKENDS: dict[str, Backend] = {"sparse kernels": "auto", "reference": "reference", "dense twin": "auto"}


def compare(config: Config, steps: int, warmup: int, results: Path = RESULTS) -> int:
    """Measure every path that can run on this machine; print the table and write the document to `results`."""
    device = choose_device(config, 0)
    rows: list[dict[str, Any]] = []
    document = begin_document("paths", device) | {"config_hash": config.hash, "steps": steps, "rows": rows}
    print(f"{config.model.name} on {document['device']}, {config.tokens_per_step(1):,} tokens per step, {steps} steps")
    paths = _paths(config, device)
    print(f"{'path':>14} {'tok/s':>10} {'p50 ms':>9} {'p95 ms':>9} {'GiB':>6} {'first loss':>11}")
    with kept_when_interrupted(document):
        for path in paths:
            rows.append(_measure(path, config, device, steps, warmup))
            _print_row(rows[-1])
    with optional_write():
        results.mkdir(parents=True, exist_ok=True)
        file = results / f"paths_{time.strftime('%Y%m%d_%H%M%S')}.json"
        write_json_atomic(file, document)
        print(f"written to {file}")
    print(json.dumps(document))
    return exit_code(document)


def _paths(config: Config, device: torch.device) -> list[str]:
    reason = why_no_kernels(device, DTYPES[config.runtime.precision], config.model.d_k)
    if reason:
        print(f"sparse kernels are not measured: {reason}")
    return [*([] if reason else ["sparse kernels"]), "reference", "dense twin"]


def _measure(path: str, config: Config, device: torch.device, steps: int, warmup: int) -> dict[str, Any]:
    tree = config.model_dump()
    tree["model"]["attention"] = "dense" if path == "dense twin" else "nsa"
    if path == "reference":
        tree["runtime"] |= {"compile": False, "cuda_graph": False}  # plain PyTorch
    shaped, backend = build_config(tree), BACKENDS[path]
    if path == "sparse kernels":
        require_right_attention(shaped, device)  # the speed of wrong kernels is no result
    torch._dynamo.reset()
    try:
        loss = _first_loss(shaped, device, backend)
        measured = measure_steps(shaped, device, random_batches(shaped).__next__, steps, warmup, backend=backend)
    except torch.OutOfMemoryError:
        return {"path": path, "error": "out of memory"}
    return {
        "path": path,
        "toks_per_s": round(measured.tokens_per_s(shaped), 1),
        "step_p50_ms": round(measured.percentile_ms(50), 3),
        "step_p95_ms": round(measured.percentile_ms(95), 3),
        "peak_gib": measured.peak_gib,
        "first_loss": round(loss, 5),
    }


@torch.no_grad()
def _first_loss(config: Config, device: torch.device, backend: Backend) -> float:
    """Return the fresh model's loss on the first batch; every way to compute the same attention gives the same."""
    torch.manual_seed(config.train.seed)
    decoder = Decoder(config, backend=backend).to(device)
    tokens = torch.from_numpy(next(random_batches(config))[0]).to(device).long()
    with autocast(config, device):
        return float(decoder.loss(tokens)[0])


def _print_row(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['path']:>14} {row['error']}", flush=True)
        return
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    print(
        f"{row['path']:>14} {row['toks_per_s']:>10,.0f} {row['step_p50_ms']:>9.1f} {row['step_p95_ms']:>9.1f} "
        f"{peak:>6} {row['first_loss']:>11.5f}",
        flush=True,
    )
