"""Starting a run: `tamis run` (the main job) and `tamis launch` (one configuration, or a launch by phases)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tamis.config import Config, load_config
from tamis.config.legacy import variable_overrides
from tamis.config.schema import Copy
from tamis.run.after_end import AfterEnd
from tamis.run.background import repeated
from tamis.run.checks.preflight import run_preflight
from tamis.run.checks.runbooks import judge_run
from tamis.run.copies.child_process import run_with_copies
from tamis.run.copies.fetch import fetch_newest
from tamis.run.cost import CostMeter, cost_banner, metered, money
from tamis.run.eta import duration_text
from tamis.run.files.console import announced, counted, print_line, say
from tamis.run.files.directory import RunDirectory, new_folder
from tamis.run.files.events import EventLog
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.hardware import Gpu, read_gpus
from tamis.run.files.identity import OtherRun, require_same_run
from tamis.run.files.info import describe_run, write_info
from tamis.run.files.lock import RunLock, require_no_launch, require_no_trainer
from tamis.run.files.reading import open_to_append
from tamis.run.finish import finish_run, has_ended
from tamis.run.handover.bundle import write_bundle
from tamis.run.handover.report import write_report
from tamis.run.monitor.web.renewal import renewed_page
from tamis.run.notify.notifier import addresses_for, notified
from tamis.run.phases import STOPPED_BY_REQUEST, launch_by_phases, production_config
from tamis.run.plan import SHOWCASE_CONFIG, LaunchPlan, launch_plan
from tamis.run.supervise.escalation import wait_until
from tamis.run.supervise.restarts import RestartBudget
from tamis.run.supervise.supervisor import LaunchOptions, is_complete, supervise
from tamis.run.supervise.worker_processes import torchrun_command, trainer_command

LAUNCH_LOGS = Path("artifacts/train_runs")
NOT_READY = "not launched: the preflight failed; each failed line above ends with its remedy"
SMOKE_STEPS = 50
ESTIMATE_TIMEOUT_S = 900
LOOK_FOR_HALT_EVERY_S = 0.5
DETACHED_START_S = 30.0  # longest wait until a detached launch holds its directory


@dataclass(frozen=True)
class Job:
    """One launch: the configuration, where it came from, and the machine it runs on."""

    config: Config
    config_path: str
    processes: int
    gpus: list[Gpu]
    restarts: int
    started: float
    meter: CostMeter | None = None

    def supervised(self, config: Config, log: Path | None = None) -> int:
        budget = RestartBudget(restarts=self.restarts)
        options = LaunchOptions(budget=budget, started=self.started, meter=self.meter)
        with renewed_page(RunDirectory(config.train.out_dir)):
            return supervise(config, processes=self.processes, log=log, options=options)


def main_job(config_path: str | None, overrides: list[str], detach: bool = False, copy_url: str | None = None) -> int:
    """Go from a bare machine to a trained model (`tamis run`); returns the exit code.

    With `copy_url`, first bring back the newest copy of a run, which then continues to be copied there.
    """
    from_variables, effects = variable_overrides(os.environ)
    if copy_url is not None:
        overrides = [f"copy.to={json.dumps(copy_url)}", *overrides]  # the user's own key comes later and wins
        config_path, needed = fetch_newest(copy_url, config_path, overrides, from_variables)
        overrides = [*needed, *overrides]
    gpus = read_gpus()
    plan = launch_plan(gpus, config_path=config_path)
    _apply(plan, effects)
    config = load_config(plan.config_path, overrides, from_variables).with_steps(plan.processes)
    if detach:
        return launch_detached(config, ["run", *([config_path] if config_path else []), *overrides])
    job = Job(config, plan.config_path, plan.processes, gpus, RestartBudget().restarts, time.time())
    return _launched(job, "launch", _main_job)


def _launched(
    job: Job, purpose: str, work: Callable[[Job, RunDirectory, RunLock], int], claims: Config | None = None
) -> int:
    """Do the work of a launch that owns OUT, with messages about it, its cost, and what follows its end.

    OUT is claimed for the configuration `claims`, by default the job's.
    """
    config, addresses = job.config, addresses_for(job.config, os.environ)
    with ExitStack() as messages:
        with claimed(claims or config, purpose) as (out, lock), metered(config, out) as meter:
            if stale := HaltFile(out.keep).discard_stale(job.started):
                say(stale)
            if banner := cost_banner(config, meter):
                say(banner)
            notifier = messages.enter_context(notified(config, out, meter, addresses))
            trained = config.model_copy(update={"copy": Copy()})  # no file of the run holds the address of its copies
            inner = replace(job, config=trained, meter=meter)
            code = run_with_copies(config.copy, out, lambda: work(inner, out, lock))
        notifier.end(code)
        AfterEnd(config, out, notifier, job.started).run(code)
    return code


def _main_job(job: Job, out: RunDirectory, lock: RunLock) -> int:
    logs = new_folder(LAUNCH_LOGS / f"m7c_{time.strftime('%Y%m%d_%H%M%S')}")
    if is_complete(out, job.config):
        code = job.supervised(job.config, log=logs / "train.log")  # prints that nothing is left to do
    else:
        if not _passes_quick_preflight(job):
            say(NOT_READY)
            return ExitCode.CRASH
        _write_run_info(job, logs, out)
        if job.gpus and (code := smoke(job, logs, out, lock)) != ExitCode.DONE:
            how = "was halted" if code in STOPPED_BY_REQUEST else f"failed with exit code {code}"
            reason = f"the smoke test {how}: nothing was launched. Read {logs / 'smoke.log'}"
            say(reason)
            EventLog(out, by="launch").record("end", reason, exit_code=int(code))
            return code
        code = job.supervised(job.config, log=logs / "train.log")
    finish_run(job.config, logs, code, job.started)
    return code


def prepare_job(config: Config, config_path: str | None, processes: int | None, restarts: int) -> Job:
    """Read the machine, print what follows from it, and set the NCCL variables that the operator left open."""
    gpus = read_gpus()
    plan = launch_plan(gpus, config_path=config_path)
    processes = processes or plan.processes
    _apply(plan, [f"processes: {processes}"])
    return Job(config.with_steps(processes), plan.config_path, processes, gpus, restarts, time.time())


def _apply(plan: LaunchPlan, effects: Sequence[str]) -> None:
    os.environ.update(plan.environment)
    chosen = [f"{name}={value}: set for this machine" for name, value in plan.environment.items()]
    for line in [*plan.reasons, *effects, *chosen]:
        say(line)


def launch_once(job: Job) -> int:
    """Run the configuration to its end under supervision."""
    return _launched(job, "launch", _launch_once)


def _launch_once(job: Job, out: RunDirectory, lock: RunLock) -> int:
    if not is_complete(out, job.config):
        _write_run_info(job, out.path, out)
    code = job.supervised(job.config)
    if code == ExitCode.COST_LIMIT:
        say(f"report: {write_report(out)}")
    return code


def _write_run_info(job: Job, logs: Path, out: RunDirectory) -> None:
    """Write run.info next to the logs and in OUT, and print its main lines, before anything slow."""
    info = describe_run(
        job.config,
        config_path=job.config_path,
        run_dir=logs,
        gpus=job.gpus,
        processes=job.processes,
        command=sys.argv,
        worker_command=trainer_command(out.config_yaml, job.processes, None),
    )
    for path in {logs / "run.info", out.run_info}:
        write_info(path, info)
    for key in ("model", "parameters", "config_hash", "tokens_per_step", "tokens_planned", "out_dir"):
        say(f"{key}: {info[key]:,}" if isinstance(info[key], int) else f"{key}: {info[key]}")


def smoke(job: Job, logs: Path, out: RunDirectory, lock: RunLock) -> int:
    """Run fifty synthetic steps of the showcase model on every GPU: drivers, collectives, checkpoints, logging.

    A .HALT in `out`, the run's own directory, stops the smoke test.
    """
    lock.sign("smoke test")
    say(f"smoke test: {SMOKE_STEPS} synthetic steps")
    rehearsal = RunDirectory(logs / "smoke").create()
    overrides = [f"train.steps={SMOKE_STEPS}", "data.dataset=synthetic", f"train.out_dir={rehearsal.path}"]
    overrides += ["runtime.precision=bf16", f"train.save_every={SMOKE_STEPS}"]
    config = load_config(SHOWCASE_CONFIG, overrides)
    with halts_forwarded(out, rehearsal, job.started):
        code = job.supervised(config, log=logs / "smoke.log")
    lock.sign("launch")
    return code


def launch_phases(job: Job, steps: Mapping[int, int] | None = None, repeat: bool = False) -> int:
    """Preflight, phases 0 to 3, then success criteria and bundle; the first failure stops it with the reason.

    OUT is claimed for what phase 3 trains, so that a run beyond its steps is refused before the preflight.
    """
    last_phase = production_config(job.config, steps)
    return _launched(
        job, "launch by phases", lambda job, out, _: _launch_phases(job, out, steps, repeat), claims=last_phase
    )


def _launch_phases(job: Job, out: RunDirectory, steps: Mapping[int, int] | None, repeat: bool) -> int:
    if not _passes_quick_preflight(job) or run_preflight(job.config, gpus=job.gpus) != 0:
        say(NOT_READY)
        return ExitCode.CRASH

    def supervised(config: Config) -> int:
        if HaltFile(out.halt).requested(job.started):
            say(f"halted between two phases: {HaltFile(out.halt).consume()}")
            return ExitCode.HALTED
        with halts_forwarded(out, RunDirectory(config.train.out_dir), job.started):
            return job.supervised(config)

    code = launch_by_phases(
        job.config,
        supervised,
        config_path=job.config_path,
        gpus=job.gpus,
        processes=job.processes,
        estimate_toks_per_s=estimated_toks_per_s(job) if job.gpus else None,
        steps=steps,
        repeat=repeat,
    )
    if code == ExitCode.DONE or has_ended(out, job.config, job.started):  # whatever the criteria found
        say("success criteria, from the files the run left:")
        judge_run(out.path)
        write_bundle(out.path)
    if code == ExitCode.COST_LIMIT:
        say(f"report: {write_report(out)}")
    return code


def _passes_quick_preflight(job: Job) -> bool:
    """Run the checks that need no torch, and print them if one fails: within a second, before anything slow."""
    lines: list[str] = []
    ready = run_preflight(job.config, gpus=job.gpus, quick=True, emit=lines.append) == 0
    if not ready:
        print_line("\n".join(lines))
    return ready


def directory_for(config: Config) -> RunDirectory:
    """Create OUT if needed. A refusal, by a launch that owns it or a run that it holds, changes no byte."""
    out = RunDirectory(config.train.out_dir).create()
    require_no_launch(out)
    require_startable(out, config)
    return out


def require_startable(out: RunDirectory, config: Config) -> None:
    """Raise unless this configuration may start, or resume, in OUT. Reads only."""
    require_no_trainer(out)
    require_same_run(out, config)
    if (newest := max(out.checkpoints(), default=0)) > config.train.steps:
        raise OtherRun(
            f"{out.path} is at step {newest}, beyond train.steps={config.train.steps}: raise train.steps "
            "(or the last number of --phase-steps), or name another train.out_dir. Nothing was changed"
        )


@contextmanager
def claimed(config: Config, purpose: str) -> Iterator[tuple[RunDirectory, RunLock]]:
    """Own OUT while the block runs: run.info and the reports in it are written by one launch alone."""
    out = RunDirectory(config.train.out_dir).create()
    with RunLock(out.launch_lock) as lock:
        lock.acquire(purpose, check=lambda: require_startable(out, config))
        yield out, lock


def launch_detached(config: Config, arguments: list[str]) -> int:
    """Start `tamis` with these arguments without a terminal; its output goes to OUT/launch.log."""
    addresses_for(config, os.environ)  # refuses here, where the operator sees it
    out = directory_for(config)
    return start_detached([sys.executable, "-u", "-m", "tamis", *arguments], out)


def start_detached(command: list[str], out: RunDirectory) -> int:
    """Start a launch in a session of its own, and wait until it holds its directory or has ended."""
    log = out.path / "launch.log"
    with open_to_append(log) as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    run = shlex.quote(str(out.path))
    say(f"launched in the background as process {process.pid}; its output goes to {log}")
    say(f"watch: tamis monitor {run}   log: tamis logs {run} --follow   halt: tamis halt {run}")
    locks = (RunLock(out.lock), RunLock(out.launch_lock))
    wait_until(lambda: any(lock.is_held() for lock in locks) or process.poll() is not None, DETACHED_START_S)
    if process.returncode:
        say(f"it has ended with exit code {process.returncode}: read {log}")
    return process.returncode or ExitCode.DONE


@contextmanager
def halts_forwarded(out: RunDirectory, phase: RunDirectory, since: float) -> Iterator[None]:
    """Forward a .HALT in OUT, where the operator puts it, to a phase that runs in a directory of its own."""
    if out.path == phase.path:
        yield
        return

    def forward() -> None:
        with suppress(OSError):  # a full disk: the request stays, and the next look tries again
            if HaltFile(out.halt).requested(since):
                HaltFile(phase.halt).request(HaltFile(out.halt).reason())
                HaltFile(out.halt).consume()

    with repeated(LOOK_FOR_HALT_EVERY_S, forward):
        yield


def estimated_toks_per_s(job: Job) -> float | None:
    """Measure a few steps with every process, in children because this needs torch; None when it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        config_file = Path(scratch) / "config.yaml"
        config_file.write_text(job.config.to_yaml(), encoding="utf-8")
        start = torchrun_command(job.processes) if job.processes > 1 else [sys.executable]
        command = [*start, "-m", "tamis", "estimate", str(config_file), "--json", "--resolved"]
        try:
            with announced("measuring a few steps for the estimate"):
                done = subprocess.run(command, capture_output=True, text=True, timeout=ESTIMATE_TIMEOUT_S)
            rate = float(json.loads(done.stdout.strip().splitlines()[-1])["toks_per_s"])
        except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            say("the estimate failed; phase 1 judges its throughput as not measured (tamis estimate shows why)")
            return None
    say(f"estimate: {rate:,.0f} tok/s with {counted(job.processes, 'process')}")
    if price := job.config.cost.per_hour:
        hours = job.config.tokens_per_step(job.processes) * job.config.train.steps / rate / 3600
        say(f"estimate: {money(hours * price)} for {duration_text(hours * 3600)} at {money(price)} an hour")
    return rate
