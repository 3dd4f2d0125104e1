"""Criteria on the GPUs: utilisation, balance, memory."""

from __future__ import annotations

import math
from statistics import mean

from tamis.config import Config
from tamis.config.size import GIB
from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, failed, not_applicable, not_measured, pass_if
from tamis.run.files.hardware import MIB
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.limits import (
    LARGEST_IMBALANCE_POINTS,
    LARGEST_MEMORY_GROWTH,
    LARGEST_MEMORY_SHARE,
    LEAST_BUSY_PERCENT,
)

GB = 1e9
ON_CPU = "the run uses no GPU"


def gpus_busy_and_balanced(evidence: Evidence) -> Finding:
    """Average utilisation from the first finished step to the last, without start-up and shutdown."""
    ends = [beat.ts for beats in evidence.step_ends.values() for beat in beats]
    if not ends:
        return failed("no step was finished")
    by_gpu: dict[int, list[int]] = {}
    for sample in evidence.usage:
        if sample.utilisation_percent is not None and min(ends) <= sample.ts <= max(ends):
            by_gpu.setdefault(sample.gpu, []).append(sample.utilisation_percent)
    if not by_gpu and not evidence.uses_gpus:
        return not_applicable(ON_CPU)
    if not by_gpu:
        return not_measured("no utilisation was sampled while steps ran (a run of a few seconds, or a virtual GPU)")
    busy = {gpu: mean(values) for gpu, values in sorted(by_gpu.items())}
    spread = max(busy.values()) - min(busy.values())
    listing = ", ".join(f"GPU {gpu} {percent:.0f}%" for gpu, percent in busy.items())
    return pass_if(
        min(busy.values()) > LEAST_BUSY_PERCENT and spread <= LARGEST_IMBALANCE_POINTS,
        f"{listing} (over {LEAST_BUSY_PERCENT}%, at most {LARGEST_IMBALANCE_POINTS} points apart)",
        max(ends),
    )


def memory_flat(evidence: Evidence) -> Finding:
    series = _memory_by_rank(evidence, "gpu_mem_alloc_gib")
    if not series:
        return _no_memory(evidence)
    growth = {rank: _growth(values) for rank, values in series.items()}
    worst = max(growth, key=lambda rank: growth[rank])
    return pass_if(
        growth[worst] <= LARGEST_MEMORY_GROWTH,
        f"rank {worst}: second half {growth[worst]:.1%} over the first (limit {LARGEST_MEMORY_GROWTH:.0%})",
    )


def memory_under_limit(evidence: Evidence) -> Finding:
    series = _memory_by_rank(evidence, "gpu_mem_reserved_gib")
    if not series:
        return _no_memory(evidence)
    limit_gb, origin = _memory_limit(evidence)
    rank, peak = max(((rank, max(values)) for rank, values in series.items()), key=lambda pair: pair[1])
    peak_gb = peak * GIB / GB
    return pass_if(
        peak_gb < limit_gb, f"peak {peak_gb:.1f} GB reserved on rank {rank}, limit {limit_gb:.3g} GB ({origin})"
    )


def _memory_limit(evidence: Evidence) -> tuple[float, str]:
    """`train.max_memory_gb`, or a share of the GPU where that is less: a smaller GPU needs headroom too."""
    key = (evidence.config or Config()).train.max_memory_gb
    sizes = [sample.total_mib * MIB / GB for sample in evidence.usage if sample.total_mib > 0]
    share = LARGEST_MEMORY_SHARE * min(sizes, default=math.inf)
    return (key, "train.max_memory_gb") if key <= share else (share, f"{LARGEST_MEMORY_SHARE:.0%} of the GPU")


def _no_memory(evidence: Evidence) -> Finding:
    if evidence.uses_gpus:
        return not_measured("the heartbeats hold no GPU memory")
    return not_applicable(ON_CPU)


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
