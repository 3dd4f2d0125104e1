"""Criteria on GPUs, memory, gates and files of a run; the companions of criteria.py, judged from artifacts alone."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from statistics import mean

from tamis.config import Config
from tamis.run.checks.criteria import typical_throughput
from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, failed, judged, not_measured, passed
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.manifest import damage, read_manifest
from tamis.run.supervise.health_rules import GATES_LEARN_WITHIN_STEPS, GATES_MOVED, LOW_ENTROPY

GB_PER_GIB = 1024**3 / 1e9
LEAST_BUSY_PERCENT = 80
LARGEST_IMBALANCE_POINTS = 15  # between the busiest and the idlest GPU
ESTIMATE_TOLERANCE = 0.20
LARGEST_MEMORY_GROWTH = 0.02  # second half against first
LARGEST_COLLAPSE_FRACTION = 0.05
LOAD_TIMEOUT_S = 600
LOAD = (  # the very function a resume calls
    "import sys, torch; from pathlib import Path; from tamis.config import load_config; "
    "from tamis.checkpoint.file import load_checkpoint; "
    "load_checkpoint(Path(sys.argv[1]), load_config(sys.argv[2]), torch.device('cpu'))"
)


def gpus_busy_and_balanced(evidence: Evidence) -> Finding:
    """Utilisation between the first and the last finished step: start-up and shutdown are no work."""
    ends = [beat.ts for beats in evidence.step_ends.values() for beat in beats]
    if not ends:
        return failed("no step was finished")
    by_gpu: dict[int, list[int]] = {}
    for sample in evidence.usage:
        if sample.utilisation_percent is not None and min(ends) <= sample.ts <= max(ends):
            by_gpu.setdefault(sample.gpu, []).append(sample.utilisation_percent)
    if not by_gpu:
        return not_measured("no utilisation was sampled while steps ran (no GPU, or a run of a few seconds)")
    busy = {gpu: mean(values) for gpu, values in sorted(by_gpu.items())}
    spread = max(busy.values()) - min(busy.values())
    listing = ", ".join(f"GPU {gpu} {percent:.0f}%" for gpu, percent in busy.items())
    return judged(
        min(busy.values()) > LEAST_BUSY_PERCENT and spread <= LARGEST_IMBALANCE_POINTS,
        f"{listing} (over {LEAST_BUSY_PERCENT}%, at most {LARGEST_IMBALANCE_POINTS} points apart)",
        max(ends),
    )


def throughput_near_estimate(evidence: Evidence) -> Finding:
    """Within 20% on both sides: far too fast is as sure a sign of a wrong model as far too slow of a wrong setting."""
    estimate = evidence.info.get("estimate_toks_per_s")
    if not estimate:
        return not_measured("run.info holds no measured estimate for this machine (tamis estimate makes one)")
    measured = typical_throughput(evidence)
    if measured is None:
        return failed("no throughput was recorded")
    return judged(
        abs(measured / estimate - 1) <= ESTIMATE_TOLERANCE,
        f"median {measured:,.0f} tok/s, {measured / estimate:.0%} of the estimate {estimate:,.0f} (±20%)",
    )


def memory_flat(evidence: Evidence) -> Finding:
    series = _memory_by_rank(evidence, "gpu_mem_alloc_gib")
    if not series:
        return not_measured("no GPU memory in the heartbeats (a run on the CPU)")
    growth = {rank: _growth(values) for rank, values in series.items()}
    worst = max(growth, key=lambda rank: growth[rank])
    return judged(
        growth[worst] <= LARGEST_MEMORY_GROWTH,
        f"rank {worst}: second half {growth[worst]:.1%} over the first (limit {LARGEST_MEMORY_GROWTH:.0%})",
    )


def memory_under_limit(evidence: Evidence) -> Finding:
    series = _memory_by_rank(evidence, "gpu_mem_reserved_gib")
    if not series:
        return not_measured("no GPU memory in the heartbeats (a run on the CPU)")
    limit_gb = (evidence.config or Config()).train.max_memory_gb
    rank, peak = max(((rank, max(values)) for rank, values in series.items()), key=lambda pair: pair[1])
    peak_gb = peak * GB_PER_GIB
    return judged(peak_gb < limit_gb, f"peak {peak_gb:.1f} GB reserved on rank {rank}, limit {limit_gb:g} GB")


def gate_entropy_healthy(evidence: Evidence) -> Finding:
    return _gates(evidence, "gate_entropy_mean", lambda value: value > LOW_ENTROPY, f"over {LOW_ENTROPY}")


def gates_not_collapsed(evidence: Evidence) -> Finding:
    limit = f"at most {LARGEST_COLLAPSE_FRACTION}"
    return _gates(evidence, "gate_collapse_fraction", lambda value: value <= LARGEST_COLLAPSE_FRACTION, limit)


def gates_have_learned(evidence: Evidence) -> Finding:
    """Three equal gates have entropy ln 3 and look healthy; only movement shows that they learn."""
    beats = [beat for beat in evidence.step_ends.get(0, []) if beat.gate_shares]
    if not beats:
        return not_measured(_why_no_gates(evidence))
    first, last = beats[0], beats[-1]
    if last.step - first.step < GATES_LEARN_WITHIN_STEPS - 1:
        return not_measured(
            f"gates were watched over {last.step - first.step} steps, {GATES_LEARN_WITHIN_STEPS} needed"
        )
    before, after = ([share for layer in beat.gate_shares or [] for share in layer] for beat in (first, last))
    moved = max(abs(a - b) for a, b in zip(before, after, strict=True))
    return judged(
        moved >= GATES_MOVED,
        f"largest change of a share {moved:.4f} from step {first.step} to {last.step}, at least {GATES_MOVED}",
        last.ts,
    )


def first_checkpoint_was_saved(evidence: Evidence) -> Finding:
    """A checkpoint of the first save; retention may have removed it since, then a later one vouches for it."""
    step = (evidence.config or Config()).train.save_every
    if evidence.last_step < step:
        return not_measured(f"the run is at step {evidence.last_step}, before the first save at {step}")
    kept = [saved for saved in evidence.directory.checkpoints() if saved >= step]
    return judged(bool(kept), f"checkpoints kept from step {step} on: {', '.join(map(str, kept)) or 'none'}")


def checkpoints_intact(evidence: Evidence) -> Finding:
    steps = evidence.directory.checkpoint_traces()
    if not steps:
        return failed("there is no checkpoint")
    for step in steps:
        if problem := damage(evidence.directory.manifest(step)):
            return failed(f"checkpoint of step {step}: {problem}")
    return passed(f"sha256 of {len(steps)} checkpoints as written (steps {', '.join(map(str, steps))})")


def newest_checkpoint_loads(evidence: Evidence) -> Finding:
    """Really loads it, in a child process, as a resume would."""
    steps = evidence.directory.checkpoints()
    if not steps:
        return failed("there is no checkpoint")
    path = evidence.directory.checkpoint(steps[-1])
    command = [sys.executable, "-c", LOAD, str(path), str(evidence.directory.config_yaml)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return failed(f"{path.name} did not load within {LOAD_TIMEOUT_S} s")
    if done.returncode:
        return failed(f"{path.name} does not load: {_error_line(done.stderr)}")
    manifest = read_manifest(evidence.directory.manifest(steps[-1]))
    return passed(f"{path.name} loaded ({manifest['bytes'] / 1e6:,.0f} MB, written {manifest['time']})")


def _error_line(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["no reason given"]
    return next((line for line in lines if re.match(r"\S*(Error|Exception)\b", line)), lines[-1])[:200]


def logs_are_on(evidence: Evidence) -> Finding:
    events = list(evidence.directory.tensorboard.glob("events.out.tfevents.*"))
    board = sum(path.stat().st_size for path in events)
    rows = len(evidence.training)
    return judged(board > 0 and rows > 0, f"training.csv {rows} rows, TensorBoard {board} bytes")


def _gates(evidence: Evidence, field: str, holds: Callable[[float], bool], limit: str) -> Finding:
    """The field over the last tenth of the steps, at its worst."""
    beats = [beat for beat in evidence.step_ends.get(0, []) if getattr(beat, field) is not None]
    if not beats:
        return not_measured(_why_no_gates(evidence))
    last = beats[-max(1, len(beats) // 10) :]
    values = [getattr(beat, field) for beat in last]
    worst = next((value for value in values if not (math.isfinite(value) and holds(value))), values[-1])
    return judged(math.isfinite(worst) and holds(worst), f"{worst:.4f} near step {last[-1].step}, {limit}", last[-1].ts)


def _why_no_gates(evidence: Evidence) -> str:
    if evidence.config and evidence.config.model.attention == "dense":
        return "dense attention has no gates"
    if evidence.config and not evidence.config.train.aux_stats:
        return "train.aux_stats is off"
    return "the heartbeats hold no gate statistics"


def _memory_by_rank(evidence: Evidence, field: str) -> dict[int, list[float]]:
    series = {rank: _values(ends, field) for rank, ends in evidence.step_ends.items()}
    return {rank: values for rank, values in series.items() if values}


def _values(beats: list[Heartbeat], field: str) -> list[float]:
    return [value for beat in beats if (value := getattr(beat, field)) is not None]


def _growth(values: list[float]) -> float:
    """Peak of the second half over peak of the first, after the first tenth."""
    settled = values[len(values) // 10 :]
    half = max(1, len(settled) // 2)
    first, second = max(settled[:half]), max(settled[half:], default=0.0)
    return max(0.0, second / first - 1) if first > 0 else 0.0
