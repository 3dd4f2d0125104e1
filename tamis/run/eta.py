"""How far a run is and when it will end, from the tokens it has processed; unknown until measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.info import ETA_UNKNOWN

LEAST_TIMED_STEPS = 3


@dataclass(frozen=True)
class TokenProgress:
    tokens_done: int | None = None
    tokens_planned: int | None = None
    tokens_per_s: float | None = None  # wall-clock, evaluations and checkpoints included
    eta_s: float | None = None  # None: not measured yet, or not running


def measure_progress(
    step_ends: Sequence[Heartbeat], tokens_per_step: int, steps: int, *, is_running: bool = True
) -> TokenProgress:
    speed = measured_tokens_per_s(step_ends, tokens_per_step)
    step = step_ends[-1].step if step_ends else 0
    left = max(0, steps - step) * tokens_per_step
    return TokenProgress(
        tokens_done=step * tokens_per_step,
        tokens_planned=steps * tokens_per_step,
        tokens_per_s=speed,
        eta_s=left / speed if speed and is_running else None,
    )


def measured_tokens_per_s(step_ends: Sequence[Heartbeat], tokens_per_step: int) -> float | None:
    """Speed over pairs of consecutive steps of one process, by its monotonic clock: no restarts, no clock jumps."""
    pairs = [(a, b) for a, b in pairwise(step_ends) if a.pid == b.pid and b.step > a.step and b.mono > a.mono]
    if len(pairs) < LEAST_TIMED_STEPS:
        return None
    steps, seconds = sum(b.step - a.step for a, b in pairs), sum(b.mono - a.mono for a, b in pairs)
    return steps * tokens_per_step / seconds


def duration_text(seconds: float | None) -> str:
    """`2 d 03:10`, `3:05:12` or `0:42`; unknown before anything was measured."""
    if seconds is None:
        return ETA_UNKNOWN
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
