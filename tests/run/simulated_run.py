"""A run that exists only as heartbeats on a clock of our own, for testing the watchdog's rules in simulated hours."""

from __future__ import annotations

from typing import Any

from tamis.run.files.events import Alarm
from tamis.run.files.heartbeat import Heartbeat, Phase
from tamis.run.files.lock import ProcessState
from tamis.run.limits import Limits
from tamis.run.supervise.health_rules import health_alarms
from tamis.run.supervise.history import RunHistory
from tamis.run.supervise.stall_rules import stall_alarms

LOOK_EVERY_S = 1.0


class SimulatedRun:
    """Time passes only in `wait`, which looks at the run every second as the watcher would."""

    def __init__(self, ranks: int = 1, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.history = RunHistory(expected_ranks=ranks)
        self.processes: dict[int, ProcessState] = dict.fromkeys(range(ranks), "running")
        self.monotonic = 1000.0
        self.wall_offset = 1.7e9
        self.pid = 100
        self.alarms: list[Alarm] = []
        self.history.tick(self.monotonic)
        self._next_look = self.monotonic + LOOK_EVERY_S

    def beat(self, phase: Phase, step: int, *, ranks: list[int] | None = None, **fields: Any) -> None:
        for rank in self.history.ranks if ranks is None else ranks:
            self.history.add([self._heartbeat(phase, step, rank, fields)])

    def wait(self, seconds: float) -> None:
        end = self.monotonic + seconds
        while self._next_look <= end:
            self.monotonic = self._next_look
            self.look()
            self._next_look += LOOK_EVERY_S
        self.monotonic = end

    def step(self, number: int, seconds: float, **fields: Any) -> None:
        """One whole step of all ranks, most of it computation."""
        self.beat("step_start", number)
        self.wait(0.05 * seconds)
        self.beat("progress", number, dt_fetch_s=0.05 * seconds)
        self.wait(0.95 * seconds)
        self.beat("step_end", number, dt_step_s=seconds, **fields)

    def steps(self, first: int, last: int, seconds: float = 1.0, **fields: Any) -> None:
        for number in range(first, last + 1):
            self.step(number, seconds, **fields)

    def look(self) -> None:
        self.history.tick(self.monotonic)
        self.history.note_dead([rank for rank, state in self.processes.items() if state == "dead"])
        self.alarms += stall_alarms(self.history, self.processes, self.limits)
        self.alarms += health_alarms(self.history, self.limits)

    def kinds(self, severity: str | None = None) -> set[str]:
        return {alarm.kind for alarm in self.alarms if severity in (None, alarm.severity)}

    def _heartbeat(self, phase: str, step: int, rank: int, fields: dict[str, Any]) -> Heartbeat:
        wall = self.monotonic + self.wall_offset
        return Heartbeat(wall, self.monotonic, rank, self.pid + rank, step, phase, **fields)
