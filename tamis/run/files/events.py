"""events.jsonl: every decision about a run with its reason, one line each; and the anomaly file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tamis.run.files.console import printable, printable_line
from tamis.run.files.directory import DirectoryReplaced, RunDirectory
from tamis.run.files.reading import open_to_append, parse_json_line, read_last_lines
from tamis.run.files.records import is_time, write_text_atomic

MOST_BYTES = 16 << 20  # read back
Severity = Literal["note", "halt", "stall"]  # report / stop for a person to look / stop by all means, then restart


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
            self.run.require_held()
            with open_to_append(self.run.events) as file:
                file.write((json.dumps(line, default=str) + "\n").encode())
        except (OSError, DirectoryReplaced) as error:  # neither may end the supervisor before its workers
            reason += f" (not recorded: {error})"
        if self._say is not None:
            self._say(f"[{self.by}] {printable_line(event)}: {printable(reason)}")

    def record_alarm(self, alarm: Alarm) -> None:
        self.record(alarm.kind, alarm.reason, severity=alarm.severity, rank=alarm.rank, **alarm.evidence)


def read_events(run: RunDirectory, most: int | None = None) -> list[dict[str, Any]]:
    """The newest events, oldest first, each with `ts`, `by`, `event` and `reason`; other lines are skipped."""
    lines = read_last_lines(run.events, MOST_BYTES, most)
    return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    event = parse_json_line(line)
    if event is None or not is_time(event.get("ts")):
        return None
    texts = {name: event[name] if isinstance(event.get(name), str) else "?" for name in ("by", "event", "reason")}
    evidence = event.get("evidence")
    return event | texts | {"evidence": evidence if isinstance(evidence, dict) else {}}


def write_anomaly(run: RunDirectory, alarm: Alarm) -> None:
    """Write the kind, for programs, and on a second line the reason, for people."""
    with contextlib.suppress(OSError):  # a full disk must not end the supervisor
        write_text_atomic(run.anomaly, f"{alarm.kind}\n{alarm.reason}\n")
