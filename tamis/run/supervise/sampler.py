"""A thread next to a run: samples the GPUs into gpu_usage.csv and keeps the measured ETA in run.info."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tamis.config import Config
from tamis.run.background import repeated
from tamis.run.eta import duration_text, measure_progress
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import Gpu, GpuLost, read_gpus
from tamis.run.files.heartbeat import Heartbeat, read_heartbeats
from tamis.run.files.info import read_info, write_eta
from tamis.run.files.records import utc
from tamis.run.supervise.usage import append_usage

TICKS_PER_ETA = 60  # a new ETA each minute
RECENT_BEATS = 3000


@contextmanager
def sampled(
    config: Config,
    processes: int,
    directory: RunDirectory,
    *,
    every_s: float = 1.0,
    read: Callable[[], Sequence[Gpu]] = read_gpus,
) -> Iterator[None]:
    """Sample the GPUs that this config's run uses, and its ETA, in a thread while the block runs."""
    ticks = itertools.count(1)
    used = 0 if config.runtime.device == "cpu" else processes

    def sample() -> None:
        if not directory.is_still_held():
            return
        with suppress(GpuLost):  # the workers report a lost GPU
            append_usage(directory, read()[:used])
        if next(ticks) % TICKS_PER_ETA == 0:
            refresh_eta(directory, config, processes)

    try:
        with repeated(every_s, sample):
            yield
    finally:
        if directory.is_still_held():
            refresh_eta(directory, config, processes)


def refresh_eta(directory: RunDirectory, config: Config, processes: int) -> None:
    """Write the measured ETA to run.info, here and in the launch's own folder; nothing before three steps."""
    beats = read_heartbeats(directory.heartbeat(0), tail=RECENT_BEATS)
    if not beats:
        return
    eta = eta_text(beats, config.tokens_per_step(processes), config.train.steps)
    if eta is None:
        return
    launched = read_info(directory.run_info).get("run_dir")
    for path in {directory.run_info, Path(launched) / "run.info" if isinstance(launched, str) else directory.run_info}:
        with suppress(OSError):  # a full disk costs the ETA, not the run nor its exit code
            write_eta(path, eta)


def eta_text(beats: list[Heartbeat], tokens_per_step: int, steps: int) -> str | None:
    """`2026-05-28T22:10:00Z, in 1:38:20 at 4,096 tok/s measured up to step 604`, or how the run ended."""
    last = beats[-1]
    if last.is_final:
        return f"{last.phase} at step {last.step}, {utc(last.ts)}"
    ends = [beat for beat in beats if beat.phase == "step_end"]
    progress = measure_progress(ends, tokens_per_step, steps)
    if progress.eta_s is None or progress.tokens_per_s is None:
        return None
    speed = f"{progress.tokens_per_s:,.0f} tok/s measured up to step {ends[-1].step}"
    return f"{utc(time.time() + progress.eta_s)}, in {duration_text(progress.eta_s)} at {speed}"
