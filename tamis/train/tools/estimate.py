"""`tamis estimate`: what a run will cost, from a short measured probe on this device, before it starts.

python -m tamis.train.tools.estimate --config configs/m7c_125m_80g.yaml --json
torchrun --nproc_per_node=2 -m tamis.train.tools.estimate --config configs/m7c_125m_80g.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tamis.config import Config, load_config
from tamis.config.size import parameter_count
from tamis.train.console import duration
from tamis.train.distributed import Ranks, choose_device, join
from tamis.train.mfu import Utilisation
from tamis.train.tools.probe import GIB, measure, random_batches

PROBE_STEPS, WARMUP = 8, 3
STATE_BYTES = 12  # per parameter in a checkpoint: weight and two moments, fp32
TRAINING_BYTES = 16  # per parameter in memory: those and the gradient
SMALL_MICRO_BATCH = 16384  # tokens; below it a large GPU waits for launches and small matrices
USABLE = 0.85  # share of a GPU's memory that a suggestion may fill


@dataclass(frozen=True)
class Estimate:
    device: str
    toks_per_s: float  # of all processes; measured by one alone, if they scale perfectly
    step_ms: float
    mfu: float | None
    peak_gib: float | None
    tokens_per_step: int
    tokens_planned: int
    eta_s: float
    checkpoint_gib: float  # each
    disk_needed_gib: float  # for those kept, and the one being written
    disk_free_gib: float
    advice: list[str]


def estimate(config: Config, processes: int = 1, ranks: Ranks | None = None) -> Estimate:
    """By this process alone for `processes` of them, or by all `ranks` together, exchange of gradients included."""
    device = ranks.device if ranks else choose_device(config, 0)
    processes = ranks.world_size if ranks else processes
    measured = measure(config, device, random_batches(config).__next__, PROBE_STEPS, WARMUP, ranks)
    rate = measured.tokens_per_s(config)
    tokens = config.tokens_per_step(processes)
    checkpoint = parameter_count(config) * STATE_BYTES / GIB
    kept = config.train.keep_checkpoints or config.train.steps // config.train.save_every
    needed, free = checkpoint * (kept + 1), _free_gib(Path(config.train.out_dir))
    advice = _memory_advice(config, device, measured.peak_gib)
    if needed > free:
        advice.append(f"checkpoints need {needed:.1f} GiB and {free:.1f} are free: lower train.keep_checkpoints")
    return Estimate(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        toks_per_s=rate * processes,
        step_ms=measured.percentile_ms(50),
        mfu=Utilisation(config, device).at(rate),
        peak_gib=measured.peak_gib,
        tokens_per_step=tokens,
        tokens_planned=tokens * config.train.steps,
        eta_s=tokens * config.train.steps / (rate * processes),
        checkpoint_gib=checkpoint,
        disk_needed_gib=needed,
        disk_free_gib=free,
        advice=advice,
    )


def _memory_advice(config: Config, device: torch.device, peak_gib: float | None) -> list[str]:
    """A micro-batch that leaves most of the GPU idle, and the size that would fill it."""
    train = config.train
    if peak_gib is None or train.batch_size * train.seq_len >= SMALL_MICRO_BATCH:
        return []
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    fixed = parameter_count(config) * TRAINING_BYTES / GIB
    per_sequence = max(peak_gib - fixed, 0.01) / train.batch_size
    fits = int((USABLE * total - fixed) / per_sequence)
    better = min(fits, 2 * SMALL_MICRO_BATCH // train.seq_len)
    if better <= train.batch_size:
        return []
    return [
        f"a micro-batch of {train.batch_size * train.seq_len:,} tokens wastes this GPU: train.batch_size={better} fits "
        f"(tokens per step then grow {better / train.batch_size:.0f}-fold; train.accumulate_grad_batches keeps them)"
    ]


def _free_gib(path: Path) -> float:
    existing = next(p for p in (path, *path.resolve().parents) if p.exists())
    return shutil.disk_usage(existing).free / GIB


def report(config: Config, processes: int = 1, as_json: bool = False) -> int:
    """Measure and print; 0 unless the checkpoints would not fit on the disk."""
    if "RANK" in os.environ:
        with join(config) as ranks:
            return _report(estimate(config, ranks=ranks), config, ranks.world_size, as_json, ranks.is_main)
    return _report(estimate(config, processes), config, processes, as_json)


def _report(result: Estimate, config: Config, processes: int, as_json: bool, speaks: bool = True) -> int:
    if not speaks:
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
        f"disk        {e.checkpoint_gib:.2f} GiB per checkpoint, {e.disk_needed_gib:.1f} GiB at most, "
        f"{e.disk_free_gib:.1f} GiB free",
        *(f"warning     {advice}" for advice in e.advice),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tamis.train.tools.estimate", description=__doc__)
    parser.add_argument("--config", help="YAML file")
    parser.add_argument("--processes", type=int, default=1, help="GPUs the run will use")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args(argv)
    return report(load_config(arguments.config, arguments.overrides), arguments.processes, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
