"""`tamis launch`: one configuration under supervision, or a whole launch by phases with checks, summary and bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tamis.config import Config
from tamis.run.background import repeated
from tamis.run.checks.preflight import run_preflight
from tamis.run.checks.runbooks import judge_run
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.hardware import Gpu, read_gpus
from tamis.run.files.info import describe_run, write_info
from tamis.run.files.lock import RunLock, require_no_launch
from tamis.run.handover.bundle import write_bundle
from tamis.run.phase_runner import launch_by_phases
from tamis.run.plan import LaunchPlan, launch_plan
from tamis.run.supervise.restarts import RestartBudget
from tamis.run.supervise.supervisor import LaunchOptions, launch

ESTIMATE_TIMEOUT_S = 900
LOOK_FOR_HALT_EVERY_S = 0.5


@dataclass(frozen=True)
class Launch:
    """What one call of `tamis launch` is about."""

    config: Config
    config_path: str
    processes: int
    gpus: list[Gpu]
    restarts: int
    started: float

    def supervised(self, config: Config, detach: bool = False) -> int:
        options = LaunchOptions(budget=RestartBudget(restarts=self.restarts))
        return launch(config, processes=self.processes, detach=detach, options=options)


def prepared(config: Config, config_path: str | None, processes: int | None, restarts: int) -> Launch:
    """Look at the machine, say what follows from it, and set the NCCL variables that the operator left open."""
    gpus = read_gpus()
    plan: LaunchPlan = launch_plan(gpus, config_path=config_path)
    os.environ.update(plan.environment)
    processes = processes or plan.processes
    for line in [
        *plan.reasons,
        f"processes: {processes}",
        *(f"{name}={value}: set for this machine" for name, value in plan.environment.items()),
    ]:
        _say(line)
    return Launch(config, plan.config_path, processes, gpus, restarts, time.time())


def launch_once(job: Launch, detach: bool = False) -> int:
    """Run the configuration to its end under supervision."""
    run = directory_for(job.config)
    info = describe_run(
        job.config,
        config_path=job.config_path,
        run_dir=run.path,
        gpus=job.gpus,
        processes=job.processes,
        command=sys.argv,
    )
    write_info(run.run_info, info)
    _say(f"{info['model']}: {info['parameters']:,} parameters, {info['tokens_per_step']:,} tokens per step, {run.path}")
    return job.supervised(job.config, detach)


def launch_phases(job: Launch, steps: Mapping[int, int] | None = None, repeat: bool = False) -> int:
    """Preflight, phases 0 to 3, then success criteria and bundle; the first failure stops it with the reason."""
    out = directory_for(job.config)
    with RunLock(out.launch_lock) as lock:
        lock.acquire("launch by phases")
        return _launch_phases(job, out, steps, repeat)


def _launch_phases(job: Launch, out: RunDirectory, steps: Mapping[int, int] | None, repeat: bool) -> int:
    if not _is_ready(job):
        _say("not launched: the preflight failed; each failed line above says what to do")
        return ExitCode.CRASH

    def supervised(config: Config) -> int:
        if HaltFile(out.halt).requested(job.started):
            _say(f"halted between two phases: {HaltFile(out.halt).consume()}")
            return ExitCode.HALTED
        with halts_passed_on(out, RunDirectory(config.train.out_dir), job.started):
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
    if code == ExitCode.DONE:
        _say("success criteria, from the files the run left:")
        judge_run(out.path)
        write_bundle(out.path)
    return code


def _is_ready(job: Launch) -> bool:
    """The whole preflight; what fails within a second is told within a second."""
    lines: list[str] = []
    if run_preflight(job.config, gpus=job.gpus, quick=True, emit=lines.append):
        print("\n".join(lines), flush=True)
        return False
    return run_preflight(job.config, gpus=job.gpus) == 0


def directory_for(config: Config) -> RunDirectory:
    """OUT, made if need be; refused while another launch owns it, before a single file in it is touched."""
    out = RunDirectory(config.train.out_dir).create()
    require_no_launch(out)
    return out


def launch_in_background(config: Config, arguments: list[str]) -> int:
    """Start the same command again without a terminal; its output goes to OUT/launch.log."""
    out = directory_for(config)
    log = out.path / "launch.log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tamis", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _say(f"launched in the background as process {process.pid}. Watch: tail -f {log}   Halt: touch {out.halt}")
    return ExitCode.DONE


@contextmanager
def halts_passed_on(out: RunDirectory, phase: RunDirectory, since: float) -> Iterator[None]:
    """While a phase runs in a directory of its own, a .HALT in OUT, where the operator puts it, stops that phase."""
    if out.path == phase.path:
        yield
        return

    def pass_on() -> None:
        if HaltFile(out.halt).requested(since):
            HaltFile(phase.halt).request(HaltFile(out.halt).consume())

    with repeated(LOOK_FOR_HALT_EVERY_S, pass_on):
        yield


def estimated_toks_per_s(job: Launch) -> float | None:
    """Measured by a short probe with every process, in children because it needs torch; None when it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        config_file = Path(scratch) / "config.yaml"
        config_file.write_text(job.config.to_yaml(), encoding="utf-8")
        start = [sys.executable, "-m"]
        if job.processes > 1:
            start += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(job.processes), "-m"]
        command = [*start, "tamis", "estimate", str(config_file), "--json", "--resolved"]
        _say("measuring a few steps for the estimate …")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ESTIMATE_TIMEOUT_S)
            rate = float(json.loads(done.stdout.strip().splitlines()[-1])["toks_per_s"])
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            _say("the estimate failed; phase 1 will judge its throughput as not measured (tamis estimate says why)")
            return None
    _say(f"estimate: {rate:,.0f} tok/s with {job.processes} process(es)")
    return rate


def _say(text: str) -> None:
    print(f"[tamis] {text}", flush=True)
