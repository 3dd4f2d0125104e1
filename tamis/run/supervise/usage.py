"""gpu_usage.csv: one row per GPU and second, and the alarm for a GPU that something slows down."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm
from tamis.run.files.hardware import FAULTS, Gpu
from tamis.run.files.reading import open_to_append, open_to_read, read_last_lines
from tamis.run.files.records import is_time, write_text_atomic
from tamis.run.limits import LEAST_GPU_SAMPLES, SLOWED_SHARE, SLOWED_WITHIN_S

HEADER = "ts,gpu,used_mib,total_mib,utilisation_percent,clock_mhz,power_w,temperature_c,slowed_by"
FIRST_COLUMNS = 5  # what a row of an earlier version has
MAX_BYTES = 48 << 20  # a day and a half of 8 GPUs at one sample a second; then the older half is dropped
MOST_DIGITS = 9  # of a number; more are damage, and too large for a chart
RECENT_BYTES = 64 << 10  # more than 8 GPUs write in SLOWED_WITHIN_S


@dataclass(frozen=True)
class UsageSample:
    """One row. None: not reported by the driver, or not recorded by an earlier version."""

    ts: float
    gpu: int
    used_mib: int
    total_mib: int
    utilisation_percent: int | None
    clock_mhz: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None
    slowed_by: tuple[str, ...] = ()


def usage_csv(directory: RunDirectory) -> Path:
    return directory.path / "gpu_usage.csv"


def append_usage(directory: RunDirectory, gpus: Sequence[Gpu]) -> None:
    """Append one sample of each GPU; nothing without a GPU or with a full disk."""
    path = usage_csv(directory)
    if not gpus or not path.parent.is_dir():
        return
    rows = "".join(_row(time.time(), gpu) for gpu in gpus)
    with suppress(OSError):  # a lost sample must not end the run
        size = path.stat().st_size if path.exists() else 0
        must_change = size > MAX_BYTES or (size and not _has_header(path))
        if must_change and shutil.disk_usage(path.parent).free > 2 * size:  # else it would fail again every second
            _rewrite(path, MAX_BYTES // 2 if size > MAX_BYTES else MAX_BYTES)
        with open_to_append(path) as file:
            file.write((rows if file.seek(0, os.SEEK_END) else f"{HEADER}\n{rows}").encode())


def read_usage(path: Path) -> list[UsageSample]:
    """All complete samples; none when there is no file."""
    return _samples(read_last_lines(path, 2 * MAX_BYTES))


def read_recent_usage(directory: RunDirectory) -> list[UsageSample]:
    """The newest samples, enough for `slowed_gpus`."""
    return _samples(read_last_lines(usage_csv(directory), RECENT_BYTES))


def slowed_gpus(samples: Iterable[UsageSample], now: float) -> list[Alarm]:
    """One note that names every GPU which heat or a fault of the machine slowed down for most of the last minute."""
    recent: dict[int, list[UsageSample]] = {}
    for sample in samples:
        if now - SLOWED_WITHIN_S <= sample.ts <= now:
            recent.setdefault(sample.gpu, []).append(sample)
    slowed = {gpu: causes for gpu, of_gpu in sorted(recent.items()) if (causes := _faults(of_gpu))}
    if not slowed:
        return []
    listing = "; ".join(f"GPU {gpu} by {' and '.join(causes)}{_now(recent[gpu][-1])}" for gpu, causes in slowed.items())
    remedy = "Ask for cooling, or for another machine; of several GPUs the slowest sets the speed of all"
    evidence = {"slowed": {str(gpu): causes for gpu, causes in slowed.items()}}
    return [Alarm("slowed_gpu", "note", f"slowed down: {listing}. {remedy}", None, evidence)]


def _faults(samples: Sequence[UsageSample]) -> list[str]:
    """What slowed a GPU down in most of these samples; nothing while there are few."""
    if len(samples) < LEAST_GPU_SAMPLES:
        return []
    counts = {cause: sum(cause in sample.slowed_by for sample in samples) for cause in FAULTS}
    return [cause for cause, count in counts.items() if count > SLOWED_SHARE * len(samples)]


def _now(sample: UsageSample) -> str:
    parts = ((sample.clock_mhz, "MHz"), (sample.temperature_c, "°C"))
    words = [f"{value:,} {unit}" for value, unit in parts if value is not None]
    return f" ({', '.join(words)})" if words else ""


def _row(now: float, gpu: Gpu) -> str:
    speed = gpu.speed
    numbers = gpu.utilisation_percent, speed.clock_mhz, speed.power_w, speed.temperature_c
    cells = ["" if number is None else str(number) for number in numbers]
    return f"{now:.1f},{gpu.index},{gpu.used_mib},{gpu.total_mib},{','.join(cells)},{' + '.join(speed.slowed_by)}\n"


def _has_header(path: Path) -> bool:
    """Whether the file has at least the columns of this version; an earlier one had fewer."""
    with open_to_read(path) as file:
        line = file.readline(4 * len(HEADER))
    return line.startswith(HEADER.encode()) and line.endswith(b"\n")


def _rewrite(path: Path, most: int) -> None:
    """Keep the last `most` bytes, all rows with the columns of the header."""
    lines = [HEADER]
    for line in read_last_lines(path, most):
        if parse_usage(line) is not None:
            row = line.decode(errors="replace")
            lines.append(row + "," * (HEADER.count(",") - row.count(",")))
    write_text_atomic(path, "\n".join(lines) + "\n")


def _samples(lines: Iterable[bytes]) -> list[UsageSample]:
    return [sample for line in lines if (sample := parse_usage(line)) is not None]


def parse_usage(line: bytes) -> UsageSample | None:
    """The sample of one row; None for the header and anything else."""
    cells = line.decode(errors="replace").split(",")
    if len(cells) == FIRST_COLUMNS:
        cells += ["", "", "", ""]
    try:
        ts, gpu, used, total, *reported, slowed_by = cells
        if max(map(len, cells[1:-1])) > MOST_DIGITS:
            return None
        utilisation, clock, power, temperature = (int(cell) if cell else None for cell in reported)
        causes = tuple(slowed_by.split(" + ")) if slowed_by else ()
        sample = UsageSample(float(ts), int(gpu), int(used), int(total), utilisation, clock, power, temperature, causes)
    except ValueError:
        return None
    return sample if is_time(sample.ts) else None
