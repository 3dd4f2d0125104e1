"""gpu_usage.csv: memory and utilisation of every GPU, sampled beside a run so that it can be judged afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import Gpu

HEADER = "ts,gpu,used_mib,total_mib,utilisation_percent"
MAX_BYTES = 32 << 20  # a day and a half of 8 GPUs at one sample a second; then the older half makes room


@dataclass(frozen=True)
class UsageSample:
    ts: float
    gpu: int
    used_mib: int
    total_mib: int
    utilisation_percent: int | None


def usage_csv(directory: RunDirectory) -> Path:
    return directory.path / "gpu_usage.csv"


def append_usage(directory: RunDirectory, gpus: Sequence[Gpu]) -> None:
    """One sample of each GPU; without a GPU, or with a full disk, nothing is written."""
    path = usage_csv(directory)
    if not gpus or not path.parent.is_dir():
        return
    rows = "".join(_row(time.time(), gpu) for gpu in gpus)
    with suppress(OSError):  # samples are not worth the run
        if path.exists() and path.stat().st_size > MAX_BYTES:
            _drop_older_half(path)
        with open(path, "a", encoding="utf-8") as file:
            file.write(rows if file.tell() else f"{HEADER}\n{rows}")


def read_usage(path: Path) -> list[UsageSample]:
    """All complete samples; no file is no samples."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[1:-1]
    except FileNotFoundError:
        return []
    return [sample for sample in map(_parse, lines) if sample]


def _row(now: float, gpu: Gpu) -> str:
    utilisation = "" if gpu.utilisation_percent is None else gpu.utilisation_percent
    return f"{now:.1f},{gpu.index},{gpu.used_mib},{gpu.total_mib},{utilisation}\n"


def _drop_older_half(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([f"{HEADER}\n", *lines[len(lines) // 2 :]]), encoding="utf-8")


def _parse(line: str) -> UsageSample | None:
    try:
        ts, gpu, used, total, utilisation = line.split(",")
        percent = int(utilisation) if utilisation else None
        return UsageSample(float(ts), int(gpu), int(used), int(total), percent)
    except ValueError:
        return None
