"""A thread next to a run: samples the GPUs into gpu_usage.csv and keeps the measured ETA in run.info."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tamis.config import Config
from tamis.run.background import repeated
from tamis.run.eta import duration_text, measure_progress
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import Gpu, GpuLost, read_gpus
from tamis.run.files.heartbeat import Heartbeat, read_heartbeats
from tamis.run.files.info import read_info, write_eta
from tamis.run.files.reading import open_to_append, read_last_lines
from tamis.run.files.records import is_time, utc, write_text_atomic

TICKS_PER_ETA = 60  # a new ETA each minute
RECENT_BEATS = 3000
HEADER = "ts,gpu,used_mib,total_mib,utilisation_percent"
MAX_BYTES = 32 << 20  # a day and a half of 8 GPUs at one sample a second; then the older half is dropped


@dataclass(frozen=True)
class UsageSample:
    ts: float
    gpu: int
    used_mib: int
    total_mib: int
    utilisation_percent: int | None


@contextmanager
def sampled(
    config: Config,
    processes: int,
    directory: RunDirectory,
    *,
    every_s: float = 1.0,
    read: Callable[[], Sequence[Gpu]] = read_gpus,
) -> Iterator[None]:
    """Sample the GPUs and the ETA of this config's run in a thread while the block runs."""
    ticks = itertools.count(1)

    def sample() -> None:
        if not directory.is_still_held():
            return
        with suppress(GpuLost):  # the workers report a lost GPU
            append_usage(directory, read())
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


def usage_csv(directory: RunDirectory) -> Path:
    return directory.path / "gpu_usage.csv"


def append_usage(directory: RunDirectory, gpus: Sequence[Gpu]) -> None:
    """Append one sample of each GPU; nothing without a GPU or with a full disk."""
    path = usage_csv(directory)
    if not gpus or not path.parent.is_dir():
        return
    rows = "".join(_row(time.time(), gpu) for gpu in gpus)
    with suppress(OSError):  # a lost sample must not end the run
        if path.exists() and path.stat().st_size > MAX_BYTES:
            _drop_older_half(path)
        with open_to_append(path) as file:
            file.write((rows if file.seek(0, os.SEEK_END) else f"{HEADER}\n{rows}").encode())


def read_usage(path: Path) -> list[UsageSample]:
    """All complete samples; none when there is no file."""
    lines = read_last_lines(path, 2 * MAX_BYTES)
    return [sample for line in lines if (sample := parse_usage(line.decode(errors="replace"))) is not None]


def _row(now: float, gpu: Gpu) -> str:
    utilisation = "" if gpu.utilisation_percent is None else gpu.utilisation_percent
    return f"{now:.1f},{gpu.index},{gpu.used_mib},{gpu.total_mib},{utilisation}\n"


def _drop_older_half(path: Path) -> None:
    newer = read_last_lines(path, MAX_BYTES // 2)
    write_text_atomic(path, "\n".join([HEADER, *(line.decode(errors="replace") for line in newer)]) + "\n")


def parse_usage(line: str) -> UsageSample | None:
    """The sample of one row; None for the header and anything else."""
    try:
        ts, gpu, used, total, utilisation = line.split(",")
        percent = int(utilisation) if utilisation else None
        sample = UsageSample(float(ts), int(gpu), int(used), int(total), percent)
    except ValueError:
        return None
    return sample if is_time(sample.ts) else None
