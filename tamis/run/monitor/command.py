"""`tamis monitor`: show a run as a live screen, or once as text or JSON. Reads only."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tamis.run.locate import existing_run
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import snapshot_text

UNHEALTHY = ("crashed", "failed")


def show_run(run_dir: str | Path, *, once: bool = False, as_json: bool = False, every_s: float = 2.0) -> int:
    """Show the run. As text or JSON, return 1 if it crashed, failed or has a problem, else 0.

    Without a terminal (a pipe, a cron job) the text is printed once. The live screen waits for a run that does not
    exist yet; text and JSON raise NoSuchRun.
    """
    if as_json or once or not sys.stdout.isatty():
        return _show_once(run_dir, as_json)
    from tamis.run.monitor.screen import MonitorScreen  # textual is an optional dependency

    files = GrowingFiles()
    MonitorScreen(lambda: read_snapshot(run_dir, files=files), every_s=every_s).run()
    return 0


def _show_once(run_dir: str | Path, as_json: bool) -> int:
    snapshot = read_snapshot(run_dir)
    if as_json:  # a document even when there is no run
        print(json.dumps(finite_or_text(asdict(snapshot)), indent=2), flush=True)
    existing_run(run_dir)
    if not as_json:
        print(snapshot_text(snapshot))
    problems = any(alert.level == "problem" for alert in snapshot.alerts)
    return 1 if problems or snapshot.state in UNHEALTHY else 0


def finite_or_text(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, with text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite_or_text(item) for name, item in value.items()}
    return [finite_or_text(item) for item in value] if isinstance(value, list) else value
