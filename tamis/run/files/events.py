"""events.jsonl: every decision about a run with its reason, one line each; and the anomaly file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_text_atomic

Severity = Literal["note", "halt", "stall"]  # tell / stop for a person to look / stop by all means, then restart


@dataclass(frozen=True)
class Alarm:
    kind: str  # written to .anomaly_type
    severity: Severity
    reason: str  # one sentence for the operator
    rank: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """Appends to one run's events; `say` also shows each to the operator."""

    def __init__(self, run: RunDirectory, *, by: str, say: Callable[[str], None] | None = None) -> None:
        self.run = run
        self.by = by  # supervisor or watchdog
        self._say = say

    def record(self, event: str, reason: str, **evidence: Any) -> None:
        line = {"ts": round(time.time(), 3), "by": self.by, "pid": os.getpid(), "event": event, "reason": reason}
        if evidence:
            line["evidence"] = evidence
        try:
            with open(self.run.events, "a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:  # a full disk must not stop the one who looks after the run
            reason += f" (not recorded: {error})"
        if self._say is not None:
            self._say(f"[{self.by}] {event}: {reason}")

    def record_alarm(self, alarm: Alarm) -> None:
        self.record(alarm.kind, alarm.reason, severity=alarm.severity, rank=alarm.rank, **alarm.evidence)


def read_events(run: RunDirectory) -> list[dict[str, Any]]:
    """All events so far, oldest first; a line cut short is passed over."""
    try:
        lines = run.events.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def write_anomaly(run: RunDirectory, alarm: Alarm) -> None:
    """First line: the kind, for programs; second: the reason, for people."""
    with contextlib.suppress(OSError):  # a full disk must not stop the one who looks after the run
        write_text_atomic(run.anomaly, f"{alarm.kind}\n{alarm.reason}\n")
