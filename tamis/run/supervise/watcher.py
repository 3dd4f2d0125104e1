"""Looks at a run: follows the heartbeats of all its ranks and the state of their processes, and asks the watchdog."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm
from tamis.run.files.heartbeat import HeartbeatFollower
from tamis.run.files.lock import ProcessId
from tamis.run.supervise.health_rules import judge_health
from tamis.run.supervise.history import RunHistory
from tamis.run.supervise.stall_rules import Limits, judge

FULL_DISK_BYTES = 1 << 20
REPEAT_NOTE_AFTER_S = 600.0


class Watcher:
    def __init__(self, run: RunDirectory, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self.limits = limits
        self.history = RunHistory()
        self.processes: dict[int, ProcessId] = {}
        self._clock = clock
        self._followers: dict[int, HeartbeatFollower] = {}
        self._noted: dict[tuple[str, int | None], float] = {}

    def begin(self, ranks: int) -> None:
        """New processes are about to start: what earlier ones wrote is history, their death is not news."""
        self.catch_up()
        self.history.restart(ranks)
        self.processes.clear()

    def look(self) -> list[Alarm]:
        """What is wrong now. A note is given once, and again only after a while."""
        self.catch_up()
        states = {rank: process.state() for rank, process in self.processes.items()}
        alarms = judge(self.history, states, self.limits, disk_is_full=_is_full(self.run.path))
        return [alarm for alarm in alarms + judge_health(self.history, self.limits) if self._is_news(alarm)]

    def catch_up(self) -> None:
        """Read what the ranks have written since the last look."""
        self.history.tick(self._clock())
        for rank, path in self.run.heartbeats().items():
            beats = self._followers.setdefault(rank, HeartbeatFollower(path)).poll()
            self.history.add(beats)
            if beats and (rank not in self.processes or self.processes[rank].pid != beats[-1].pid):
                self.processes[rank] = ProcessId.of(beats[-1].pid)

    @property
    def furthest_step(self) -> int:
        """The last step any rank has finished in this run, before or after a restart."""
        return max((beat.step for rank in self.history.ranks.values() for beat in rank.recent), default=0)

    @property
    def all_have_ended(self) -> bool:
        """Every rank has said its last word, or its process is gone."""
        ranks = self.history.ranks.values()
        return bool(ranks) and all(
            rank.last is not None and (rank.last.is_final or self._is_dead(rank.rank)) for rank in ranks
        )

    def exit_codes(self) -> dict[int, int | None]:
        """What each rank said it exits with; None for a rank that said nothing."""
        return {
            rank.rank: rank.last.exit_code if rank.last and rank.last.is_final else None
            for rank in self.history.ranks.values()
        }

    def lasting_failure(self) -> str | None:
        """What a rank said it failed of, when it also said that another try would end the same way."""
        last_words = [rank.last for rank in self.history.ranks.values() if rank.last and rank.last.is_final]
        return next((beat.detail or beat.phase for beat in last_words if beat.lasting), None)

    def _is_dead(self, rank: int) -> bool:
        return rank in self.processes and self.processes[rank].state() == "dead"

    def _is_news(self, alarm: Alarm) -> bool:
        if alarm.severity != "note":
            return True
        key, now = (alarm.kind, alarm.rank), self._clock()
        if now - self._noted.get(key, float("-inf")) < REPEAT_NOTE_AFTER_S:
            return False
        self._noted[key] = now
        return True


def _is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path).free < FULL_DISK_BYTES
    except OSError:  # the directory is gone; silence will tell
        return False
