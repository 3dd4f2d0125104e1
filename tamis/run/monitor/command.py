"""`tamis monitor`: the run as a live screen, or once as text or JSON. Never writes, and never disturbs the run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tamis.run.find import existing_run
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import snapshot_text

UNHEALTHY = ("crashed", "failed")


def show_run(run_dir: str | Path, *, once: bool = False, as_json: bool = False, every_s: float = 2.0) -> int:
    """Show the run. Once or as JSON, the exit code tells: 0 healthy, 1 crashed, failed or with a problem.

    Without a terminal (a pipe, a cron job) the text is printed once. The live screen waits for a run that is not there
    yet; where nobody can wait, NoSuchRun is raised.
    """
    if as_json or once or not sys.stdout.isatty():
        return _show_once(run_dir, as_json)
    from tamis.run.monitor.screen import MonitorScreen  # textual is only needed, and only installed, where people look

    MonitorScreen(lambda: read_snapshot(run_dir), every_s=every_s).run()
    return 0


def _show_once(run_dir: str | Path, as_json: bool) -> int:
    snapshot = read_snapshot(run_dir)
    if as_json:  # a document, whatever there is
        print(json.dumps(_speakable(asdict(snapshot)), indent=2), flush=True)
    existing_run(run_dir)
    if not as_json:
        print(snapshot_text(snapshot))
    problems = any(alert.level == "problem" for alert in snapshot.alerts)
    return 1 if problems or snapshot.state in UNHEALTHY else 0


def _speakable(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _speakable(item) for name, item in value.items()}
    return [_speakable(item) for item in value] if isinstance(value, list) else value
