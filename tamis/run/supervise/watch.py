"""The watchdog on its own, beside a run that something else started: `scripts/_watchdog.py --dir OUT --halt 1`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tamis.config import ConfigError, load_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog, write_anomaly
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.lock import ProcessId, RunLock
from tamis.run.find import no_run_in
from tamis.run.supervise.escalation import Grace, Ladder
from tamis.run.supervise.stall_rules import Limits, limits_for
from tamis.run.supervise.watcher import Watcher


def watch(
    directory: str | Path,
    *,
    halt: bool = True,
    look_every_s: float = 1.0,
    limits: Limits | None = None,
    grace: Grace | None = None,
    say: Callable[[str], None] = lambda message: print(message, flush=True),
) -> int:
    """Watch until the run has ended (0) or something is wrong with it (5), which is then halted if `halt` is set."""
    run = RunDirectory(directory)
    if not run.path.is_dir():
        say(f"error: --dir {no_run_in(directory)}")
        return ExitCode.USAGE
    watcher = Watcher(run, limits or limits_of(run))
    events = EventLog(run, by="watchdog", say=say)
    say(f"[watchdog] watching {run.path}, {'halting' if halt else 'only reporting'} on an alarm")
    watcher.catch_up()
    watcher.history.forget_former_ranks()
    while True:
        for alarm in watcher.look():
            if alarm.kind == "dead_rank" and RunLock(run.lock).is_held():
                continue  # its supervisor restarts it
            events.record_alarm(alarm)
            if alarm.severity != "note":
                return _stop(run, watcher, alarm, events, halt, grace)
        if watcher.all_have_ended:
            say("[watchdog] the run has ended")
            return ExitCode.DONE
        time.sleep(look_every_s)


def limits_of(directory: str | Path | RunDirectory) -> Limits:
    """What follows from the run's own config, where it has one that can be read."""
    try:
        return limits_for(load_config(RunDirectory(directory).config_yaml))
    except ConfigError:
        return Limits()


def _stop(run: RunDirectory, watcher: Watcher, alarm: Alarm, events: EventLog, halt: bool, grace: Grace | None) -> int:
    write_anomaly(run, alarm)
    living = {rank: process for rank, process in watcher.processes.items() if process.is_alive()}
    if halt and living:
        Ladder(run, living, events, grace=grace).climb(
            alarm.reason,
            has_ended=lambda: not any(process.is_alive() for process in living.values()),
            send=lambda number: _send_all(living.values(), number),
            dump=alarm.severity == "stall",
        )
    return ExitCode.ANOMALY


def _send_all(processes: Iterable[ProcessId], number: int) -> None:
    for process in processes:
        process.send(number)
