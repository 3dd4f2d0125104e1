"""The supervisor: starts the workers of a run, watches them, restarts them from the newest valid checkpoint.

It never imports torch, so a GPU that hangs cannot block it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog, write_anomaly
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.lock import RunLock, RunLocked
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.files.records import VAL_HEADER, CsvLog, write_text_atomic
from tamis.run.limits import Grace, Limits, limits_for
from tamis.run.supervise.escalation import BY_WATCHDOG, Escalation, wait_until
from tamis.run.supervise.restarts import Ending, RestartBudget, true_exit_code
from tamis.run.supervise.sampler import sampled
from tamis.run.supervise.watchdog import Watchdog
from tamis.run.supervise.worker_processes import Screen, WorkerProcesses, trainer_command

ORPHANS_EXIT_WITHIN_S = 40.0  # their sidecars ask the workers of a dead supervisor to stop, within 25 s

CommandFor = Callable[[Path, int, Path | None], list[str]]


@dataclass
class LaunchOptions:
    """Settings of one supervised run; the defaults are for production."""

    watch: bool = True  # act on the watchdog's alarms
    limits: Limits | None = None  # default: those that follow from the config
    budget: RestartBudget = field(default_factory=RestartBudget)
    grace: Grace = field(default_factory=Grace)
    look_every_s: float = 1.0
    command: CommandFor = trainer_command  # config.yaml, processes, checkpoint or None → command line


def supervise(
    config: Config, *, processes: int = 1, log: Path | None = None, options: LaunchOptions | None = None
) -> int:
    """Run the configuration to its end under supervision; returns the exit code (`docs/run-directory.md`).

    `log` defaults to OUT/train.log. Raises RunLocked when another launch owns the directory.
    """
    run = RunDirectory(config.train.out_dir).create()
    log = log or run.train_log
    log.parent.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run.lock)
    previous = lock.owner()
    lock.acquire("launch")
    with lock, sampled(config, processes):
        supervisor = Supervisor(config, run, processes, log, options or LaunchOptions())
        if previous is not None:
            supervisor.events.record("adopt", f"the last supervisor (pid {previous.get('pid')}) died; taking over")
        return supervisor.run_to_its_end()


class Supervisor:
    """One run from its first start to its last exit."""

    def __init__(self, config: Config, run: RunDirectory, processes: int, log: Path, options: LaunchOptions) -> None:
        self.config, self.run, self.processes, self.log, self.options = config, run, processes, log, options
        self.screen = Screen()
        self.events = EventLog(run, by="supervisor", say=self._say)
        self.watchdog = Watchdog(run, options.limits or limits_for(config))
        self.asked_to_stop = 0  # number of TERM and INT received
        self.kill_at: float | None = None  # monotonic; set when TERM was passed on
        self.killed = False
        self.started = time.time()

    def run_to_its_end(self) -> int:
        with self._signals_handled():
            self._prepare()
            return self._attempts()

    def _prepare(self) -> None:
        if stale := HaltFile(self.run.halt).discard_stale(self.started):
            self.events.record("stale_halt", stale)
        self._wait_for_orphans()
        write_text_atomic(self.run.config_yaml, self.config.to_yaml())
        self.watchdog.catch_up()
        self.options.budget.step_at_launch = self.watchdog.furthest_step

    def _attempts(self) -> int:
        while True:
            checkpoint = self._checkpoint()
            if checkpoint is not None and self._is_complete(checkpoint):
                return ExitCode.DONE
            decision = self.options.budget.decide(self._attempt(checkpoint))
            if not decision.restart:
                self.events.record("end", decision.reason, exit_code=int(decision.code))
                return int(decision.code)
            self.events.record("restart", f"{decision.reason}, in {decision.delay_s:.0f} s")
            if (stopped := self._pause(decision.delay_s)) is not None:
                self.events.record("end", "asked to stop while waiting to restart", exit_code=int(stopped))
                return stopped

    def _attempt(self, checkpoint: Path | None) -> Ending:
        """Start the workers, watch them until they end, and return how they ended."""
        command = self.options.command(self.run.config_yaml, self.processes, checkpoint)
        self.watchdog.begin(self.processes)
        since = "from the beginning" if checkpoint is None else f"from {checkpoint.name}"
        workers = WorkerProcesses(command, self.log, self.screen)
        self.events.record(
            "start",
            f"{self.processes} worker(s) {since}",
            command=command,
            pid=workers.process.pid,
            watch=self.options.watch,
        )
        alarm = None
        while not workers.has_ended():
            alarm = alarm or self._watch(workers)
            self._pass_on_stop(workers)
            wait_until(workers.has_ended, self.options.look_every_s)
        self._end_stragglers()
        workers.close()
        self.watchdog.catch_up()
        self._forget_own_halt()
        code = true_exit_code(workers.process.returncode, self.watchdog.exit_codes())
        lasting, term_sent = self.watchdog.lasting_failure(), self.kill_at is not None
        return Ending(code, self.watchdog.furthest_step, alarm, term_sent, lasting)

    def _watch(self, workers: WorkerProcesses) -> Alarm | None:
        """Record the alarms, and stop the run for one that requires it; returns that alarm."""
        if not self.options.watch or self.asked_to_stop:
            return None
        for alarm in self.watchdog.look():
            self.events.record_alarm(alarm)
            if alarm.severity != "note":
                write_anomaly(self.run, alarm)
                self._stop_for(alarm, workers)
                return alarm
        return None

    def _stop_for(self, alarm: Alarm, workers: WorkerProcesses) -> None:
        escalation = Escalation(self.run, self.watchdog.processes, self.events, grace=self.options.grace)
        escalation.stop(
            alarm.reason,
            has_ended=lambda: workers.has_ended() or self.asked_to_stop > 1,
            send=workers.send,
            dump=alarm.severity == "stall",
        )

    def _end_stragglers(self) -> None:
        """End ranks that outlive a killed torchrun before the next start; most exit by themselves."""
        self.watchdog.catch_up()
        ranks = list(self.watchdog.processes.values())

        def are_gone() -> bool:
            return not any(process.is_alive() for process in ranks)

        wait_until(are_gone, 1.0)
        for number, patience_s in ((signal.SIGTERM, self.options.grace.term_s), (signal.SIGKILL, 5.0)):
            for process in ranks:
                process.send(number)
            wait_until(are_gone, patience_s)

    def _forget_own_halt(self) -> None:
        """Remove a .HALT of the watchdog, which was for the attempt that has ended; one by a person still counts."""
        halt = HaltFile(self.run.halt)
        if halt.requested() and halt.reason().startswith(BY_WATCHDOG):
            halt.consume()

    def _pass_on_stop(self, workers: WorkerProcesses) -> None:
        """Pass the first request on as TERM; kill the workers after a second one, or when they take too long."""
        if not self.asked_to_stop or self.killed:
            return
        if self.kill_at is None:
            self.events.record("term", "asked to stop; the workers save a checkpoint and exit")
            self.kill_at = time.monotonic() + self.options.grace.term_s
            workers.send(signal.SIGTERM)
        elif self.asked_to_stop > 1 or time.monotonic() > self.kill_at:
            why = "asked to stop a second time" if self.asked_to_stop > 1 else "the workers did not exit after TERM"
            self.events.record("kill", f"{why}; killing them")
            self.killed = True
            workers.send(signal.SIGKILL)

    def _checkpoint(self) -> Path | None:
        step = latest_valid_checkpoint(self.run, on_damaged=lambda message: self.events.record("damaged", message))
        return None if step is None else self.run.checkpoint(step)

    def _is_complete(self, checkpoint: Path) -> bool:
        """True if the last step is saved and evaluated; a run killed between the two still has the evaluation to do."""
        last, validated = self.config.train.steps, CsvLog(self.run.val_csv, VAL_HEADER).steps()
        complete = checkpoint == self.run.checkpoint(last) and (last in validated or not self.config.train.csv)
        if complete:
            further = "raise train.steps to go on, or name another train.out_dir to start over"
            self.events.record("end", f"{checkpoint.name} is the last step: nothing left to do; {further}", exit_code=0)
        return complete

    def _pause(self, seconds: float) -> int | None:
        """Wait before a restart; returns the exit code if a stop is requested in the meantime."""
        halt = HaltFile(self.run.halt)
        wait_until(lambda: bool(self.asked_to_stop) or halt.requested(), seconds)
        if self.asked_to_stop:
            return ExitCode.PREEMPTED
        if halt.requested():
            halt.consume()
            return ExitCode.HALTED
        return None

    def _wait_for_orphans(self) -> None:
        """Wait for the workers of a killed supervisor to exit: two trainers never share a directory."""
        lock = RunLock(self.run.trainer_lock)
        if lock.is_held():
            self.events.record("wait", f"a trainer (pid {(lock.owner() or {}).get('pid')}) still runs here; waiting")
            wait_until(lambda: not lock.is_held() or bool(self.asked_to_stop), ORPHANS_EXIT_WITHIN_S)
        if lock.is_held():
            raise RunLocked(lock.refusal())

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        handlers: dict[int, Any] = {
            signal.SIGTERM: self._on_stop,
            signal.SIGINT: self._on_stop,
            signal.SIGHUP: self._on_hangup,
            signal.SIGUSR1: signal.SIG_IGN,  # inherited by torchrun, which it would end
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop += 1

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Continue without the terminal; the output is in the log."""

    def _say(self, message: str) -> None:
        self.screen.say(message)
        with suppress(OSError), open(self.log, "a", encoding="utf-8") as file:
            file.write(message + "\n")
