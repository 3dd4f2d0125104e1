"""`tamis estimate`: what a run will cost, from a few measured steps on this device, before it starts.

torchrun --nproc_per_node=2 -m tamis estimate configs/m7c_125m_80g.yaml   # measures the exchange of gradients too
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tamis.config import Config
from tamis.config.size import CHECKPOINT_BYTES_PER_PARAMETER, TRAINING_BYTES_PER_PARAMETER, parameter_count
from tamis.train.console import duration
from tamis.train.distributed import Ranks, choose_device, join
from tamis.train.mfu import Utilisation
from tamis.train.tools.probe import GIB, measure_steps, random_batches

PROBE_STEPS, WARMUP = 8, 3
SMALL_MICRO_BATCH = 16384  # tokens; with fewer, a large GPU is bound by launches and small matrices
# Training speed with NSA over that of the dense twin, by sequence length; 125M on one H200, see docs/performance.md.
NSA_OVER_DENSE = {2048: 0.83, 4096: 0.90, 8192: 1.10, 16384: 1.49, 32768: 2.24, 65536: 3.34}
SAME_SPEED = 0.05  # a smaller difference decides nothing
USABLE = 0.85  # share of a GPU's memory that a suggestion may fill


@dataclass(frozen=True)
class Estimate:
    device: str
    toks_per_s: float  # of all processes; extrapolated linearly when one process measures alone
    step_ms: float
    mfu: float | None
    peak_gib: float | None
    tokens_per_step: int
    tokens_planned: int
    eta_s: float
    cost: float | None  # $; None where cost.per_hour is not set
    checkpoint_gib: float  # each
    disk_needed_gib: float  # for those kept, and the one being written
    disk_free_gib: float
    advice: list[str]


def estimate_run(config: Config, processes: int = 1, ranks: Ranks | None = None) -> Estimate:
    """Measure with this process alone and scale to `processes`, or with all `ranks`, which exchange gradients."""
    device = ranks.device if ranks else choose_device(config, 0)
    processes = ranks.world_size if ranks else processes
    measured = measure_steps(config, device, random_batches(config).__next__, PROBE_STEPS, WARMUP, ranks)
    rate = measured.tokens_per_s(config)
    tokens = config.tokens_per_step(processes)
    checkpoint = parameter_count(config) * CHECKPOINT_BYTES_PER_PARAMETER / GIB
    kept = config.train.keep_checkpoints or config.train.steps // config.train.save_every
    needed, free = checkpoint * (kept + 1), _free_gib(Path(config.train.out_dir))
    advice = _memory_advice(config, device, measured.peak_gib)
    if needed > free:
        advice.append(f"checkpoints need {needed:.2f} GiB and {free:.2f} are free: lower train.keep_checkpoints")
    eta_s = tokens * config.train.steps / (rate * processes)
    return Estimate(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        toks_per_s=rate * processes,
        step_ms=measured.percentile_ms(50),
        mfu=Utilisation(config, device).at(rate, [config.train.seq_len]),
        peak_gib=measured.peak_gib,
        tokens_per_step=tokens,
        tokens_planned=tokens * config.train.steps,
        eta_s=eta_s,
        cost=eta_s / 3600 * config.cost.per_hour if config.cost.per_hour else None,
        checkpoint_gib=checkpoint,
        disk_needed_gib=needed,
        disk_free_gib=free,
        advice=[*advice, *_cost_advice(config, eta_s / 3600)],
    )


def _cost_advice(config: Config, hours: float) -> list[str]:
    """Warn of a limit that would end the run before its last step."""
    cost, advice = config.cost, []
    if cost.max is not None and hours * cost.per_hour > cost.max:
        advice.append(f"cost.max={cost.max:g} ends the run before its last step")
    if cost.max_hours is not None and hours > cost.max_hours:
        advice.append(f"cost.max_hours={cost.max_hours:g} ends the run before its last step")
    return advice


def _memory_advice(config: Config, device: torch.device, peak_gib: float | None) -> list[str]:
    """Suggest a larger micro-batch where this one leaves most of the GPU idle."""
    train = config.train
    if peak_gib is None or train.batch_size * train.seq_len >= SMALL_MICRO_BATCH:
        return []
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    fixed = parameter_count(config) * TRAINING_BYTES_PER_PARAMETER / GIB
    per_sequence = max(peak_gib - fixed, 0.01) / train.batch_size
    fits = int((USABLE * total - fixed) / per_sequence)
    better = min(fits, 2 * SMALL_MICRO_BATCH // train.seq_len)
    if better <= train.batch_size:
        return []
    return [
        f"a micro-batch of {train.batch_size * train.seq_len:,} tokens wastes this GPU: train.batch_size={better} fits "
        f"(tokens per step then grow {better / train.batch_size:.0f}-fold; train.accumulate_grad_batches keeps them)"
    ]


def compared_with_dense(config: Config, device: str) -> str:
    """Which attention trains faster at this length, from the measured lengths around it; on a GPU alone."""
    length = config.train.seq_len
    lengths, ratios = zip(*NSA_OVER_DENSE.items(), strict=True)
    if device == "CPU" or not lengths[0] <= length <= lengths[-1]:
        here = "on a CPU" if device == "CPU" else f"at {length:,} tokens"
        known = f"it was from {lengths[0]:,} to {lengths[-1]:,} tokens, 125M on one H200"
        return f"whether NSA or dense is faster was not measured {here}; {known}"
    ratio = float(np.interp(math.log(length), np.log(lengths), ratios))
    if abs(ratio - 1) < SAME_SPEED:
        verdict = "NSA and dense are about equally fast"
    elif ratio > 1:
        verdict = f"NSA is faster, about {ratio:.1f} times as fast as dense"
    else:
        verdict = f"dense is faster, NSA about {ratio:.2f} times as fast; model.attention=dense trains the dense twin"
    return f"at {length:,} tokens {verdict} (125M on one H200)"


def _free_gib(path: Path) -> float:
    existing = next(p for p in (path, *path.resolve().parents) if p.exists())
    return shutil.disk_usage(existing).free / GIB


def run_estimate(config: Config, processes: int = 1, as_json: bool = False) -> int:
    """Measure and print; returns 1 if the checkpoints would not fit on the disk, else 0."""
    config = config.with_steps(int(os.environ.get("WORLD_SIZE", processes)))
    if "RANK" in os.environ:
        with join(config) as ranks:
            return _print_estimate(estimate_run(config, ranks=ranks), config, ranks.world_size, as_json, ranks.is_main)
    return _print_estimate(estimate_run(config, processes), config, processes, as_json)


def _print_estimate(result: Estimate, config: Config, processes: int, as_json: bool, is_main: bool = True) -> int:
    if not is_main:
        return 0
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        for line in _lines(result, config, processes):
            print(line)
    return 0 if result.disk_needed_gib <= result.disk_free_gib else 1


def _lines(e: Estimate, config: Config, processes: int) -> list[str]:
    mfu = "not known for this device" if e.mfu is None else f"{e.mfu:.1%}"
    return [
        f"{config.model.name}: {parameter_count(config):,} parameters on {processes} × {e.device}, measured in "
        f"{PROBE_STEPS} steps on random tokens",
        f"speed       {e.toks_per_s:,.0f} tok/s, {e.step_ms:.1f} ms per step, MFU {mfu}",
        f"memory      {'-' if e.peak_gib is None else f'{e.peak_gib:.1f} GiB per GPU'}",
        f"tokens      {e.tokens_per_step:,} per step, {e.tokens_planned:,} in all",
        f"time        {duration(e.eta_s)} for {config.train.steps:,} steps, if data and other GPUs keep up",
        *([] if e.cost is None else [f"price       {e.cost:,.2f} $ at {config.cost.per_hour:,.2f} $ an hour"]),
        f"attention   {compared_with_dense(config, e.device)}",
        f"disk        {e.checkpoint_gib:.2f} GiB per checkpoint, {e.disk_needed_gib:.2f} GiB at most, "
        f"{e.disk_free_gib:.1f} GiB free",
        *(f"warning     {advice}" for advice in e.advice),
    ]
