"""OUT/live.html: the page as one file, renewed every minute while a run is under way and once more at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tamis.run.background import repeated
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_text_atomic
from tamis.run.handover.redaction import Redact, redactor
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.web.page import page_state, render_page

RENEW_EVERY_S = 60.0


@contextmanager
def renewed_page(run: RunDirectory, every_s: float = RENEW_EVERY_S) -> Iterator[None]:
    """Keep the page of a run up to date while the block runs. A failure costs the page alone."""
    files = GrowingFiles()
    out = _out(run)

    def renew() -> None:
        with suppress(Exception):  # whatever a file holds, the page must not end the run
            write_live_page(out, files)

    before = _recorded_bytes(run)
    with repeated(every_s, renew):
        yield
    if _recorded_bytes(run) != before:  # a refusal, or a run that was done already, changes nothing in OUT
        renew()


def write_live_page(out: RunDirectory, files: GrowingFiles) -> Path:
    """Write OUT/live.html without secrets: it is meant to be copied and looked at elsewhere."""
    state = _redacted(page_state(out.path, files), redactor(os.environ))
    path = out.live_html
    if out.path.is_dir():
        write_text_atomic(path, render_page(state, f"{state['name']}: live"))
    return path


def _recorded_bytes(run: RunDirectory) -> int:
    """Size of the run's events, to which every start and end adds one."""
    with suppress(OSError):
        return run.events.stat().st_size
    return 0


def _out(run: RunDirectory) -> RunDirectory:
    """The directory that the operator named, also while a phase runs in one of its own below it."""
    return RunDirectory(run.path.parents[1]) if run.path.parent.name == "phases" else run


def _redacted(value: Any, redact: Redact) -> Any:
    """The same JSON value with every text redacted."""
    if isinstance(value, dict):
        return {name: _redacted(item, redact) for name, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, redact) for item in value]
    return redact(value) if isinstance(value, str) else value
