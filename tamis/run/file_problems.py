"""Which files of a run cannot be read as what they should be, each in one sentence. Reads only, bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tamis.config import ConfigError
from tamis.run.checks.evidence import parse_config, parse_row
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import parse_event
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.info import parse_info
from tamis.run.files.manifest import read_manifest
from tamis.run.files.reading import open_to_read, parse_json_line, read_bytes, read_json, read_last_lines, read_text
from tamis.run.supervise.usage import parse_usage, usage_csv

TAIL_BYTES = 16 << 10  # of a file of lines
MOST_LOCK_BYTES = 64 << 10


def file_problems(run: RunDirectory) -> list[str]:
    """A sentence for each odd file: a folder or a FIFO in its place, a link out, or content of another kind."""
    found = []
    for path, check in _checks(run):
        try:
            check(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            text = str(error)
            found.append(text if text.startswith(path.name) else f"{path.name}: {text}")
    return found


def _checks(run: RunDirectory) -> list[tuple[Path, Callable[[Path], Any]]]:
    return [
        (run.config_yaml, _check_config),
        (run.run_info, lambda path: parse_info(read_text(path))),
        *((path, read_json) for path in (run.metrics_json, run.env_json, run.copies, run.cost_json, run.eval_json)),
        *((run.path / f"{stem}.json", read_json) for stem in ("go_no_go", "preflight", "judgement")),
        *((path, read_text) for path in (run.halt, run.anomaly)),
        *((path, _check_lock) for path in (run.lock, run.launch_lock, run.trainer_lock)),
        *((path, _lines_of(parse)) for path, parse in ((run.events, parse_event), (run.samples, parse_json_line))),
        *((path, _lines_of(Heartbeat.from_line)) for path in run.heartbeats().values()),
        (run.training_csv, _lines_of(lambda line: parse_row(line, 4))),
        (run.val_csv, _lines_of(lambda line: parse_row(line, 3))),
        (usage_csv(run), _lines_of(parse_usage)),
        *((path, _check_regular) for path in (run.train_log, run.path / "launch.log")),
        *((run.manifest(step), read_manifest) for step in run.checkpoints()),
    ]


def _lines_of(parse: Callable[[bytes], object]) -> Callable[[Path], None]:
    """A check that at least half of the last lines can be read; a kill or a full disk may cut a few."""

    def check(path: Path) -> None:
        with open_to_read(path) as file:
            is_empty = not file.read(1)
        lines = read_last_lines(path, TAIL_BYTES)
        unreadable = sum(parse(line) is None for line in lines)
        headers = 1 if path.suffix == ".csv" else 0
        if not is_empty and (not lines or unreadable - headers > len(lines) / 2):
            raise ValueError(f"{unreadable} of its last {len(lines)} lines cannot be read")

    return check


def _check_regular(path: Path) -> None:
    open_to_read(path).close()


def _check_config(path: Path) -> None:
    try:
        parse_config(read_text(path))
    except ConfigError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _check_lock(path: Path) -> None:
    if read_bytes(path, MOST_LOCK_BYTES).strip() and not isinstance(read_json(path), dict):
        raise ValueError("it names no owner")
