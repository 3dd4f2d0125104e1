"""`tamis list`, `tamis status` and `tamis logs`: runs in a table, one run in a few lines, the end of its log."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tamis.run.files.console import printable, printable_line
from tamis.run.files.directory import RunDirectory
from tamis.run.files.info import read_info
from tamis.run.files.reading import lines_after, open_to_read, sample_lines
from tamis.run.locate import existing_run, runs_in
from tamis.run.monitor.command import UNHEALTHY, finite_or_text
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import ENDED, status_lines

MOST_LOG_BYTES = 2**20
LOOK_EVERY_S = 1.0
POSITION = "\x1e"  # cannot begin a line of the log, whose control characters are shown as escapes


def list_lines(folder: Path) -> list[str]:
    """A table of the runs in a folder, the newest last."""
    rows = [("state", "step", "loss", "tok/s", "size", "run"), *map(_cells, list_records(folder))]
    if len(rows) == 1:
        return [f"no runs in {folder}: tamis run starts one"]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join([*map(str.ljust, row[:5], widths), printable_line(row[5])]) for row in rows]


def list_records(folder: Path) -> list[dict[str, Any]]:
    """The same as JSON objects."""
    runs = sorted(runs_in(folder), key=lambda run: run.path.stat().st_mtime)
    return [_record(run) for run in runs]


def _record(run: RunDirectory) -> dict[str, Any]:
    snapshot = read_snapshot(run.path, gpus=[])
    figures = {name: getattr(snapshot, name) for name in ("state", "step", "steps", "loss", "toks_per_s")}
    return finite_or_text({"run": str(run.path), **figures, "bytes": _size(run.path)})


def _cells(record: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    step, steps, loss, speed = (record[name] for name in ("step", "steps", "loss", "toks_per_s"))
    return (
        record["state"],
        f"{step:,}/{steps:,}" if steps else f"{step:,}",
        f"{loss:.4f}" if isinstance(loss, float) else str(loss or "-"),
        f"{speed:,.0f}" if isinstance(speed, float) else str(speed or "-"),
        f"{record['bytes'] / 1e9:,.2f} GB",
        record["run"],
    )


def _size(path: Path) -> int:
    """Bytes of all files under a folder; a running trainer may remove some of them meanwhile."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def print_status(run_dir: str | Path) -> int:
    """Print the state of one run in a few lines; returns 1 if it crashed, failed or has a problem."""
    snapshot = read_snapshot(existing_run(run_dir).path)
    problems = [alert.text for alert in snapshot.alerts if alert.level == "problem"]
    print("\n".join(printable_line(line) for line in [*status_lines(snapshot), *problems]))
    return 1 if problems or snapshot.state in UNHEALTHY else 0


def print_log(
    run_dir: str | Path, lines: int, follow: bool = False, *, after: int | None = None, positions: bool = False
) -> None:
    """Print the last lines of a run's train.log, and with `follow` those that come until the run ends.

    `after` starts at that byte instead; with `positions`, a line with POSITION and the next byte follows each block.
    """
    run = existing_run(run_dir)
    log = _log_of(run)
    offset = after or 0
    with suppress(FileNotFoundError), open_to_read(log) as file:
        if after is None or after > os.fstat(file.fileno()).st_size:  # a log that was begun again
            _print_lines(sample_lines(file, 0, MOST_LOG_BYTES)[-lines:])
            offset = file.tell()
            _print_position(offset, positions)
    while follow or after is not None:
        is_over = not follow or read_snapshot(run.path, gpus=[]).state in ENDED
        with suppress(FileNotFoundError), open_to_read(log) as file:
            new, offset = lines_after(file, offset, MOST_LOG_BYTES)
            _print_lines([] if new == [b""] else new)
            _print_position(offset, positions and new != [b""])
        if is_over:
            return
        time.sleep(LOOK_EVERY_S)


def _print_position(offset: int, wanted: bool) -> None:
    if wanted:
        print(f"{POSITION}{offset}", flush=True)


def last_log_lines(run_dir: str | Path, lines: int) -> list[str]:
    """The end of a run's train.log, with escapes made harmless; empty if there is none."""
    with suppress(OSError), open_to_read(_log_of(RunDirectory(run_dir))) as file:
        found = sample_lines(file, 0, MOST_LOG_BYTES)[-lines:]
        return [printable_line(line.decode(errors="replace")) for line in found]
    return []


def _print_lines(lines: list[bytes]) -> None:
    for line in lines:
        print(printable(line.decode(errors="replace")), flush=True)


def _log_of(run: RunDirectory) -> Path:
    """The newer of OUT/train.log and the log in the launch's own folder, where `tamis run` writes it."""
    logs = [run.train_log, Path(str(read_info(run.run_info).get("run_dir", run.path))) / "train.log"]
    return max((log for log in logs if log.is_file()), key=lambda log: log.stat().st_mtime, default=run.train_log)
