"""Curves of a run as named series of (step, value), thinned to what a screen or a page can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from tamis.run.checks.evidence import Evidence, TrainingRow, ValidationRow
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.identity import CONFIG_CHANGED
from tamis.run.supervise.usage import UsageSample

Series = dict[str, list[tuple[float, float]]]  # name → points
BRANCHES = ("compressed", "selected", "window")


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Reduce to `most` points: means of equal stretches, and the last point unchanged. Drops non-finite values."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) <= most:
        return finite
    size = math.ceil(len(finite) / (most - 1))
    stretches = [finite[start : start + size] for start in range(0, len(finite), size)]
    means = [(stretch[len(stretch) // 2][0], math.fsum(v for _, v in stretch) / len(stretch)) for stretch in stretches]
    return [*means[: most - 1], finite[-1]]


class Logged(Protocol):
    """Holder of the logged rows: the evidence of a run, or a snapshot of it."""

    @property
    def training(self) -> list[TrainingRow]: ...
    @property
    def validation(self) -> list[ValidationRow]: ...


def loss_curves(evidence: Logged) -> Series:
    return {
        "training": [(row.step, row.loss) for row in evidence.training],
        "validation": [(row.step, row.loss) for row in evidence.validation],
    }


def speed_curve(evidence: Logged) -> Series:
    return {"tokens per second": [(row.step, row.toks_per_s) for row in evidence.training]}


def learning_rate_curve(evidence: Evidence) -> Series:
    return {"learning rate": [(row.step, row.lr) for row in evidence.training]}


def gradient_curve(evidence: Evidence) -> Series:
    return {"gradient norm": _field(evidence, 0, lambda beat: beat.grad_norm)}


def step_time_curves(evidence: Evidence) -> Series:
    return {
        "step": _field(evidence, 0, lambda beat: beat.dt_step_s),
        "of it, waiting for data": _field(evidence, 0, lambda beat: beat.dt_fetch_s),
    }


def memory_curves(evidence: Evidence) -> Series:
    return {f"rank {rank}": _field(evidence, rank, lambda beat: beat.gpu_mem_alloc_gib) for rank in evidence.beats}


def entropy_curves(evidence: Evidence) -> Series:
    beats = [(beat.step, beat.gate_entropy) for beat in evidence.step_ends.get(0, []) if beat.gate_entropy]
    layers = min((len(entropies) for _, entropies in beats), default=0)
    return {f"layer {n}": [(step, entropies[n]) for step, entropies in beats] for n in range(layers)}


def share_curves(evidence: Evidence) -> Series:
    """Mean over the layers."""
    beats = [(beat.step, beat.gate_shares) for beat in evidence.step_ends.get(0, []) if beat.gate_shares]
    return {
        name: [(step, sum(layer[n] for layer in shares) / len(shares)) for step, shares in beats]
        for n, name in enumerate(BRANCHES)
    }


def selection_curves(evidence: Evidence) -> Series:
    """Mean over the NSA layers of each figure of selection health."""
    figures = ("distinct", "distance", "likeness")
    return {name: _layer_mean(evidence, f"selection_{name}") for name in figures}


def utilisation_curves(evidence: Evidence) -> Series:
    return _usage_curves(evidence, lambda sample: sample.utilisation_percent)


def clock_curves(evidence: Evidence) -> Series:
    return _usage_curves(evidence, lambda sample: sample.clock_mhz)


def power_curves(evidence: Evidence) -> Series:
    return _usage_curves(evidence, lambda sample: sample.power_w)


def _usage_curves(evidence: Evidence, value: Callable[[UsageSample], int | None]) -> Series:
    """One curve per GPU over minutes since the first sample: the samples carry no step."""
    start = evidence.usage[0].ts if evidence.usage else 0.0
    series: Series = {}
    for sample in evidence.usage:
        if (number := value(sample)) is not None:
            series.setdefault(f"GPU {sample.gpu}", []).append(((sample.ts - start) / 60, float(number)))
    return series


def _field(evidence: Evidence, rank: int, value: Callable[[Heartbeat], float | None]) -> list[tuple[float, float]]:
    points = ((beat.step, value(beat)) for beat in evidence.step_ends.get(rank, []))
    return [(step, number) for step, number in points if number is not None]


def _layer_mean(evidence: Evidence, field: str) -> list[tuple[float, float]]:
    beats = [(beat.step, getattr(beat, field)) for beat in evidence.step_ends.get(0, [])]
    return [(step, sum(values) / len(values)) for step, values in beats if values]


def changed_hyperparameters(evidence: Evidence) -> list[tuple[int, str]]:
    """The step and the text of each change of hyperparameters at a resume."""
    events = [event for event in evidence.events if event["event"] == CONFIG_CHANGED]
    found = [(event["evidence"].get("step"), event["reason"]) for event in events]
    return [(step, reason) for step, reason in found if type(step) is int and 0 <= step < 2**53]
