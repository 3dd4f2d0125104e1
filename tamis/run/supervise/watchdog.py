"""The watchdog: follows the heartbeats of all ranks and the state of their processes, and applies the rules.

The supervisor holds a `Watchdog`. `watch_run` is one on its own, for a run that something else started:
`scripts/_watchdog.py --dir OUT --halt 1`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tamis.config import ConfigError, load_config
from tamis.run.files.console import print_line
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog, write_anomaly
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import HeartbeatFollower
from tamis.run.files.lock import ProcessId, RunLock
from tamis.run.limits import Grace, Limits, limits_for
from tamis.run.locate import no_run_in
from tamis.run.supervise.escalation import Escalation
from tamis.run.supervise.health_rules import health_alarms, save_alarms
from tamis.run.supervise.history import RunHistory
from tamis.run.supervise.stall_rules import stall_alarms
from tamis.run.supervise.usage import read_recent_usage, slowed_gpus

FULL_DISK_BYTES = 1 << 20
REPEAT_NOTE_AFTER_S = 600.0
REPEAT_SLOWED_GPU_AFTER_S = 6 * 3600.0  # a hot machine stays hot, and one message a shift is enough


class Watchdog:
    """What is known about one run's ranks, and which alarms follow from it."""

    def __init__(self, run: RunDirectory, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self.limits = limits
        self.history = RunHistory()
        self.processes: dict[int, ProcessId] = {}
        self._clock = clock
        self._followers: dict[int, HeartbeatFollower] = {}
        self._noted: dict[tuple[str, int | None], float] = {}

    def begin(self, ranks: int) -> None:
        """Forget the processes of earlier attempts: new ones are about to start."""
        self.catch_up()
        self.history.restart(ranks)
        self.processes.clear()

    def look(self) -> list[Alarm]:
        """Return the alarms of this moment. A note is returned once, and again only after a while."""
        self.catch_up()
        states = {rank: process.state() for rank, process in self.processes.items()}
        self.history.note_dead([rank for rank, state in states.items() if state == "dead"])
        alarms = stall_alarms(self.history, states, self.limits, disk_is_full=_is_full(self.run.path))
        alarms += [*health_alarms(self.history, self.limits), *save_alarms(self.history), *self._unreadable_files()]
        alarms += slowed_gpus(read_recent_usage(self.run), time.time())
        return [alarm for alarm in alarms if self._is_news(alarm)]

    def catch_up(self) -> None:
        """Read what the ranks have written since the last look."""
        self.history.tick(self._clock())
        for rank, path in self.run.heartbeats().items():
            beats = self._followers.setdefault(rank, HeartbeatFollower(path)).poll()
            beats = [beat for beat in beats if beat.rank == rank]
            self.history.add(beats)
            if beats and (rank not in self.processes or self.processes[rank].pid != beats[-1].pid):
                self.processes[rank] = ProcessId.recorded(beats[-1].pid, beats[-1].started, beats[-1].host)

    @property
    def furthest_step(self) -> int:
        """The last step any rank has finished in this run, before or after a restart."""
        return max((beat.step for rank in self.history.ranks.values() for beat in rank.recent), default=0)

    @property
    def all_have_ended(self) -> bool:
        """True if every rank has written its final heartbeat, or its process is gone."""
        ranks = self.history.ranks.values()
        return bool(ranks) and all(
            rank.last is not None and (rank.last.is_final or self._is_dead(rank.rank)) for rank in ranks
        )

    def exit_codes(self) -> dict[int, int | None]:
        """The exit code in each rank's final heartbeat; None for a rank without one."""
        return {
            rank.rank: rank.last.exit_code if rank.last and rank.last.is_final else None
            for rank in self.history.ranks.values()
        }

    def lasting_failure(self) -> str | None:
        """The error of a rank that marked it as lasting: another try would end the same way."""
        finals = [rank.last for rank in self.history.ranks.values() if rank.last and rank.last.is_final]
        return next((beat.detail or beat.phase for beat in finals if beat.lasting), None)

    def _unreadable_files(self) -> list[Alarm]:
        return [
            Alarm("unreadable_file", "note", follower.problem, rank)
            for rank, follower in self._followers.items()
            if follower.problem
        ]

    def _is_dead(self, rank: int) -> bool:
        return rank in self.processes and self.processes[rank].state() == "dead"

    def _is_news(self, alarm: Alarm) -> bool:
        if alarm.severity != "note":
            return True
        key, now = (alarm.kind, alarm.rank), self._clock()
        repeat_after_s = REPEAT_SLOWED_GPU_AFTER_S if alarm.kind == "slowed_gpu" else REPEAT_NOTE_AFTER_S
        if now - self._noted.get(key, float("-inf")) < repeat_after_s:
            return False
        self._noted[key] = now
        return True


def _is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path).free < FULL_DISK_BYTES
    except OSError:  # the directory is gone; the silence that follows raises its own alarm
        return False


def watch_run(
    directory: str | Path,
    *,
    halt: bool = True,
    look_every_s: float = 1.0,
    limits: Limits | None = None,
    grace: Grace | None = None,
    say: Callable[[str], None] = print_line,
) -> int:
    """Watch until the run has ended (0) or an alarm is raised (5); the run is then halted if `halt` is set."""
    run = RunDirectory(directory)
    if not run.path.is_dir():
        say(f"error: --dir {no_run_in(directory)}")
        return ExitCode.USAGE
    watchdog = Watchdog(run, limits or limits_of(run))
    events = EventLog(run, by="watchdog", say=say)
    say(f"[watchdog] watching {run.path}, {'halting' if halt else 'only reporting'} on an alarm")
    watchdog.catch_up()
    watchdog.history.forget_former_ranks()
    while True:
        for alarm in watchdog.look():
            if alarm.kind == "dead_rank" and RunLock(run.lock).is_held():
                continue  # its supervisor restarts it
            events.record_alarm(alarm)
            if alarm.severity != "note":
                return _stop(run, watchdog, alarm, events, halt, grace)
        if watchdog.all_have_ended:
            say("[watchdog] the run has ended")
            return ExitCode.DONE
        time.sleep(look_every_s)


def limits_of(directory: str | Path | RunDirectory) -> Limits:
    """The limits that follow from a run's own config; the defaults when it has none that can be read."""
    try:
        return limits_for(load_config(RunDirectory(directory).config_yaml))
    except ConfigError:
        return Limits()


def _stop(
    run: RunDirectory, watchdog: Watchdog, alarm: Alarm, events: EventLog, halt: bool, grace: Grace | None
) -> int:
    write_anomaly(run, alarm)
    living = {rank: process for rank, process in watchdog.processes.items() if process.is_alive()}
    if halt and living:
        Escalation(run, living, events, grace=grace).stop(
            alarm.reason,
            has_ended=lambda: not any(process.is_alive() for process in living.values()),
            send=lambda number: _send_all(living.values(), number),
            dump=alarm.severity == "stall",
        )
    return ExitCode.ANOMALY


def _send_all(processes: Iterable[ProcessId], number: int) -> None:
    for process in processes:
        process.send(number)
