"""The supervisor: starts the workers of a run, watches them, restarts them from the newest valid checkpoint.

It never imports torch, so a GPU that hangs cannot block it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from tamis.config import Config
from tamis.run.background import signals_handled
from tamis.run.cost import CostMeter, metered
from tamis.run.file_problems import file_problems
from tamis.run.files.console import counted, say
from tamis.run.files.directory import DirectoryReplaced, RunDirectory
from tamis.run.files.events import Alarm, EventLog, write_anomaly
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.identity import is_finished, record_changes, require_same_run
from tamis.run.files.info import read_info
from tamis.run.files.lock import RunLock, RunLocked
from tamis.run.files.manifest import DamagedCheckpoint, checkpoint_to_resume, latest_valid_checkpoint, remove_scratch
from tamis.run.files.reading import open_to_append
from tamis.run.files.records import write_text_atomic
from tamis.run.limits import Grace, Limits, limits_for
from tamis.run.supervise.checkpoint_check import FirstCheckpointCheck
from tamis.run.supervise.escalation import BY_WATCHDOG, Escalation, wait_until
from tamis.run.supervise.restarts import Ending, RestartBudget, true_exit_code
from tamis.run.supervise.sampler import sampled
from tamis.run.supervise.spare import SpareWorker
from tamis.run.supervise.watchdog import Watchdog
from tamis.run.supervise.worker_processes import Screen, WorkerProcesses, trainer_command

BY_COST = "cost: "  # first word of the reason in a .HALT at the cost limit
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
    started: float = field(default_factory=time.time)  # of the launch; a .HALT from before it is stale
    meter: CostMeter | None = None  # of the launch; default: one of this run alone
    spare_after_s: float = 30.0  # of a worker's life, and after its first step: the spare never slows its start


def supervise(
    config: Config, *, processes: int = 1, log: Path | None = None, options: LaunchOptions | None = None
) -> int:
    """Run the configuration to its end under supervision; returns the exit code (`docs/run-directory.md`).

    `log` defaults to OUT/train.log. Before anything in OUT changes, raises RunLocked when another launch owns it, and
    OtherRun when it holds another run.
    """
    run = RunDirectory(config.train.out_dir).create()
    lock = RunLock(run.lock)
    previous = lock.owner()
    lock.acquire("launch", check=lambda: require_same_run(run, config))
    log = log or run.train_log
    log.parent.mkdir(parents=True, exist_ok=True)
    with lock:
        checkpoint_to_resume(run)  # refuses while nothing has changed
        if is_complete(run, config):
            say(nothing_to_do(run, config))
            return ExitCode.DONE
        run.hold()
        options = options or LaunchOptions()
        with sampled(config, processes, run), _meter(config, run, options) as meter:
            supervisor = Supervisor(config, run, processes, log, replace(options, meter=meter))
            if previous is not None:
                supervisor.events.record("adopt", f"the last supervisor (pid {previous.get('pid')}) died; taking over")
            return supervisor.run_to_its_end()


def _meter(config: Config, run: RunDirectory, options: LaunchOptions) -> AbstractContextManager[CostMeter]:
    return metered(config, run) if options.meter is None else nullcontext(options.meter)


def is_complete(run: RunDirectory, config: Config) -> bool:
    """True if the last step is saved, and the trainer recorded its end there."""
    last = config.train.steps
    if last not in run.checkpoints() or not is_finished(run, last):
        return False
    return latest_valid_checkpoint(run, on_damaged=lambda message: None) == last


def nothing_to_do(run: RunDirectory, config: Config) -> str:
    last = run.checkpoint(config.train.steps)
    further = "raise train.steps to continue, or name another train.out_dir to start over"
    return f"{last} is the last step: nothing left to do; {further}"


class Supervisor:
    """One run from its first start to its last exit."""

    def __init__(self, config: Config, run: RunDirectory, processes: int, log: Path, options: LaunchOptions) -> None:
        self.config, self.run, self.processes, self.log, self.options = config, run, processes, log, options
        self.meter = options.meter or CostMeter(config, run)
        self.cost_limit: str | None = None  # in words, once it is reached
        self.term_at = math.inf  # monotonic; the end of the patience for a halt at the cost limit
        self.screens = Screen(1), Screen(2)
        self.events = EventLog(run, by="supervisor", say=self._say)
        self.watchdog = Watchdog(run, options.limits or _with_estimate(limits_for(config), run))
        self.checkpoint_check = FirstCheckpointCheck(run, config, self.events)
        self.spare = SpareWorker(log, self.screens)
        self.asked_to_stop = 0  # number of TERM and INT received
        self.kill_at: float | None = None  # monotonic; set when TERM was passed on
        self.killed = False

    def run_to_its_end(self) -> int:
        handlers = {
            signal.SIGTERM: self._on_stop,
            signal.SIGINT: self._on_stop,
            signal.SIGHUP: self._on_hangup,
            signal.SIGUSR1: signal.SIG_IGN,  # inherited by torchrun, which it would end
        }
        with signals_handled(handlers):
            self._prepare()
            try:
                return self._attempts()
            finally:
                self.checkpoint_check.close()
                self.spare.close()

    def _prepare(self) -> None:
        if stale := HaltFile(self.run.halt).discard_stale(self.options.started):
            self.events.record("stale_halt", stale)
        for problem in file_problems(self.run):
            self.events.record("unreadable_file", problem)
        self._end_orphans()
        remove_scratch(self.run)
        record_changes(self.events, require_same_run(self.run, self.config), max(self.run.checkpoints(), default=0))
        write_text_atomic(self.run.config_yaml, self.config.to_yaml())
        self.watchdog.catch_up()
        self.options.budget.step_at_launch = self.watchdog.furthest_step

    def _attempts(self) -> int:
        while True:
            try:
                checkpoint = self._checkpoint()
            except DamagedCheckpoint as error:
                self.events.record("end", str(error), exit_code=int(ExitCode.USAGE))
                return ExitCode.USAGE
            if is_complete(self.run, self.config):  # killed after its last record, before it could exit
                self.events.record("end", nothing_to_do(self.run, self.config), exit_code=0)
                return ExitCode.DONE
            if (limit := self.meter.limit_reached()) is not None:
                self.events.record("end", limit, exit_code=int(ExitCode.COST_LIMIT))
                return ExitCode.COST_LIMIT
            decision = self.options.budget.decide(self._attempt(checkpoint))
            if not decision.restart:
                spent = {"budget_spent": True} if decision.budget_spent else {}
                self.events.record("end", decision.reason, exit_code=int(decision.code), **spent)
                return int(decision.code)
            when = f"in {decision.delay_s:.0f} s" if decision.delay_s else "at once"
            self.events.record("restart", f"{decision.reason}, {when}")
            if (stopped := self._pause(decision.delay_s)) is not None:
                self.events.record("end", "asked to stop while waiting to restart", exit_code=int(stopped))
                return stopped

    def _attempt(self, checkpoint: Path | None) -> Ending:
        """Start the workers, watch them until they end, and return how they ended."""
        command = self.options.command(self.run.config_yaml, self.processes, checkpoint)
        self.watchdog.begin(self.processes)
        since = "from the beginning" if checkpoint is None else f"from {checkpoint.name}"
        spare = self.spare.take(command)
        workers = spare or WorkerProcesses(command, self.log, self.screens)
        self.events.record(
            "start",
            f"{counted(self.processes, 'worker')} {since}",
            command=command,
            pid=workers.process.pid,
            watch=self.options.watch,
            spare=spare is not None,
        )
        alarm, spare_at = None, time.monotonic() + self.options.spare_after_s
        while not workers.has_ended():
            self._require_own_directory(workers)
            self.checkpoint_check.poll()
            alarm = alarm or self._watch(workers)
            if self._needs_spare() and time.monotonic() >= spare_at:
                self.spare.start(command)
            self._halt_at_cost_limit()
            self._pass_on_stop(workers)
            wait_until(workers.has_ended, self.options.look_every_s)
        self.run.require_held()
        self._end_stragglers()
        workers.close()
        self.watchdog.catch_up()
        self._forget_own_halt()
        code = true_exit_code(workers.process.returncode, self.watchdog.exit_codes())
        lasting, term_sent = self.watchdog.lasting_failure(), self.kill_at is not None
        return Ending(code, self.watchdog.furthest_step, alarm, term_sent, lasting, self.cost_limit)

    def _needs_spare(self) -> bool:
        """True once a single worker has made a step; torchrun starts its workers itself."""
        return (
            self.config.runtime.spare_worker
            and self.processes == 1
            and self.watchdog.history.ranks[0].steps_by_this_process > 0
        )

    def _require_own_directory(self, workers: WorkerProcesses) -> None:
        """End the run when OUT was moved or removed: what its workers wrote now would mix with another run's files."""
        try:
            self.run.require_held()
        except DirectoryReplaced:
            workers.send(signal.SIGKILL)
            workers.close()
            raise

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
        """Remove a .HALT that no person wrote: it was for the attempt that has ended. One by a person still counts."""
        halt = HaltFile(self.run.halt)
        if halt.requested() and halt.reason().startswith((BY_WATCHDOG, BY_COST)):
            halt.consume()

    def _halt_at_cost_limit(self) -> None:
        """Ask for a halt once the limit is reached, and for TERM when the workers take too long to reach it."""
        if self.cost_limit is None:
            self.cost_limit = self.meter.limit_reached()
            if self.cost_limit is None:
                return
            self.events.record("cost_limit", f"{self.cost_limit}. The workers save a checkpoint and exit")
            self.term_at = time.monotonic() + self.options.grace.cost_s
            with suppress(OSError):  # no space for a file: TERM needs none
                HaltFile(self.run.halt).request(BY_COST + self.cost_limit)
        elif time.monotonic() > self.term_at and not self.asked_to_stop:
            self.asked_to_stop = 1

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
        step = checkpoint_to_resume(self.run, on_damaged=lambda message: self.events.record("damaged", message))
        return None if step is None else self.run.checkpoint(step)

    def _pause(self, seconds: float) -> int | None:
        """Wait before a restart, not beyond the cost limit; returns the exit code if a stop is requested meanwhile."""
        halt = HaltFile(self.run.halt)
        wait_until(lambda: bool(self.asked_to_stop or halt.requested() or self.meter.limit_reached()), seconds)
        if self.asked_to_stop:
            return ExitCode.PREEMPTED
        if halt.requested():
            halt.consume()
            return ExitCode.HALTED
        return None

    def _end_orphans(self) -> None:
        """End the workers of a supervisor that was killed: two trainers never share a directory.

        Their sidecars ask them to save and exit. What is still there afterwards is stuck, and is killed.
        """
        lock = RunLock(self.run.trainer_lock)
        if not lock.is_held():
            return
        self.watchdog.catch_up()
        workers = {*self.watchdog.processes.values(), *filter(None, [lock.owner_process()])}
        self.events.record("wait", f"a trainer (pid {(lock.owner() or {}).get('pid')}) still runs here; waiting")
        wait_until(lambda: not lock.is_held() or bool(self.asked_to_stop), self.options.grace.orphan_s)
        if lock.is_held() and not self.asked_to_stop:
            stuck = sorted(worker.pid for worker in workers if worker.is_alive())
            words = f"workers {stuck} of a supervisor that is gone are stuck; killing them"
            self.events.record("kill", words)
            for worker in workers:
                worker.send(signal.SIGKILL)
            wait_until(lambda: not lock.is_held(), self.options.grace.term_s)
        if lock.is_held():
            raise RunLocked(lock.refusal())

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop += 1

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Continue without the terminal; the output is in the log."""

    def _say(self, message: str) -> None:
        self.screens[0].say(message)
        if self.run.is_still_held():
            with suppress(OSError), open_to_append(self.log) as file:
                file.write(message.encode() + b"\n")


def _with_estimate(limits: Limits, run: RunDirectory) -> Limits:
    """The limits with the step time that `tamis estimate` measured for this launch, if it did."""
    info = read_info(run.run_info)
    rate, tokens = info.get("estimate_toks_per_s"), info.get("tokens_per_step")
    if not isinstance(rate, (int, float)) or not isinstance(tokens, int) or rate <= 0:
        return limits
    return replace(limits, expected_step_s=tokens / rate)
