"""`tamis profile`: a few real training steps under PyTorch's profiler; writes a trace and a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from tamis.config import Config
from tamis.data import open_loader
from tamis.model import Decoder
from tamis.run.files.console import counted
from tamis.run.files.records import write_text_atomic
from tamis.train.distributed import Ranks, choose_device, device_name
from tamis.train.step import TrainStep

WARM_UP_STEPS = 3  # before the steady state: compilation, and the allocator's growth
PARTS = ("fetch", "forward", "compressed", "selection", "selected", "window", "backward", "optimizer")
ROWS = 30


def profile_steps(config: Config, steps: int, folder: str | Path | None = None) -> int:
    """Train a fresh model for `steps` steps of the configured data and write trace.json and table.txt to `folder`."""
    folder = Path(folder or Path(config.train.out_dir) / "profile")
    folder.mkdir(parents=True, exist_ok=True)
    device = choose_device(config, 0)
    print(f"[tamis] profiling {counted(steps, 'step')} of {config.model.name} on {device_name(device)}", flush=True)
    profiler = _profiled(config, device, steps)
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = profiler.key_averages()
    parts = host_ms_per_step(averages, steps)
    table = averages.table(sort_by=by, row_limit=ROWS)
    lines = [f"{name:12} {parts[name]:9.3f} ms of the host per step" for name in PARTS if name in parts]
    if "forward" not in parts:
        lines.append("forward and backward are replayed as one CUDA graph: runtime.cuda_graph=false shows their parts")
    write_text_atomic(folder / "table.txt", "\n".join([*lines, "", table, ""]))
    profiler.export_chrome_trace(str(folder / "trace.json"))
    print("\n".join([*lines, "", table]))
    print(f"[tamis] {folder / 'table.txt'}; open {folder / 'trace.json'} in a browser's trace viewer")
    print(json.dumps({"device": device_name(device), "steps": steps, "host_ms_per_step": parts}))
    return 0


def host_ms_per_step(rows: Iterable[Any], steps: int) -> dict[str, float]:
    """Sum host time by part of the step; a range's device time is another row of the same name, without host time."""
    parts: dict[str, float] = {}
    for row in rows:
        if row.key in PARTS:
            parts[row.key] = parts.get(row.key, 0.0) + row.cpu_time_total / steps / 1e3
    return parts


def _profiled(config: Config, device: torch.device, steps: int) -> torch.profiler.profile:
    torch.manual_seed(config.train.seed)
    step = TrainStep(Decoder(config).to(device), config, Ranks(0, 1, device))
    loader = open_loader(config)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    try:
        for number in range(WARM_UP_STEPS):
            step(loader.next().tokens, number + 1)
        with torch.profiler.profile(activities=activities) as profiler:
            for number in range(WARM_UP_STEPS, WARM_UP_STEPS + steps):
                with torch.profiler.record_function("fetch"):
                    tokens = loader.next().tokens
                step(tokens, number + 1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        loader.close()
    return profiler
