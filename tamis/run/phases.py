"""Phases 0 to 3 of a launch: their step counts, data and criteria, and `launch_by_phases`, which runs them in order.

Each phase runs in a directory of its own and is judged from the files it leaves. A phase that fails stops the launch
with the reason and a remedy. One that passed before, with the same config, commit, GPUs and step count, is not repeated
unless asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from tamis.config import Config, ConfigError, build_config
from tamis.run.checks.criteria import checkpoints, gates, gpu, operation, selection, training
from tamis.run.checks.evidence import read_evidence
from tamis.run.checks.findings import (
    Criterion,
    Finding,
    findings_text,
    has_failed,
    is_go,
    parse_findings,
    print_findings,
    verdict,
)
from tamis.run.files.console import counted
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.hardware import Gpu
from tamis.run.files.info import describe_run, git_commit, write_info
from tamis.run.files.reading import read_json
from tamis.run.files.records import utc, write_json_atomic, write_text_atomic
from tamis.run.supervise.supervisor import is_complete
from tamis.run.supervise.worker_processes import trainer_command

RunToEnd = Callable[[Config], int]  # runs a config under supervision to its end; returns the exit code
STOPPED_BY_REQUEST = (ExitCode.HALTED, ExitCode.PREEMPTED, ExitCode.COST_LIMIT)
FASTER_DATA = (
    "check the network, HF_DATASETS_CACHE and data.prefetch_batches; data.dataset: synthetic tells data from compute"
)
LESS_MEMORY = "lower train.batch_size and raise train.accumulate_grad_batches, or set runtime.gradient_checkpointing"
LOOK_AT_LOSS = "look at training.csv and the gradient norm; lower train.lr or lengthen train.warmup_steps"
COMPLETED = Criterion("all steps were done", training.completed, "read the end of train.log and events.jsonl")
NO_STALL = Criterion("no stall", operation.no_alarms, "read stackdump_*.txt and events.jsonl")
LOSS_FINITE = Criterion("loss is finite", training.loss_finite, LOOK_AT_LOSS)


@dataclass(frozen=True)
class Phase:
    number: int
    title: str
    steps: int | None  # None: that of the config
    dataset: Literal["synthetic"] | None  # None: that of the config
    criteria: tuple[Criterion, ...]


PHASES = (
    Phase(
        0,
        "wiring: one step on synthetic data",
        steps=1,
        dataset="synthetic",
        criteria=(
            COMPLETED,
            Criterion(
                "heartbeats on every rank",
                training.heartbeats_on_every_rank,
                "a rank did not start: read train.log, then run tamis check for the collectives",
            ),
        ),
    ),
    Phase(
        1,
        "smoke on the dataset",
        steps=300,
        dataset=None,
        criteria=(
            COMPLETED,
            NO_STALL,
            LOSS_FINITE,
            Criterion("loss is falling", training.loss_falling, LOOK_AT_LOSS),
            Criterion("step times are steady", training.step_times_steady, FASTER_DATA),
            Criterion("data keeps up", training.data_keeps_up, FASTER_DATA),
            Criterion(
                "GPUs busy and balanced",
                gpu.gpus_busy_and_balanced,
                "raise train.batch_size or train.accumulate_grad_batches; " + FASTER_DATA,
            ),
            Criterion(
                "throughput near the estimate",
                training.throughput_near_estimate,
                "make the estimate again (tamis estimate), and look for other processes on the GPUs",
            ),
        ),
    ),
    Phase(
        2,
        "extended smoke",
        steps=1000,
        dataset=None,
        criteria=(
            COMPLETED,
            NO_STALL,
            LOSS_FINITE,
            Criterion("memory is flat", gpu.memory_flat, "compare two snapshots of NSA_MEM_DUMP_EVERY=100"),
            Criterion("memory is under the limit", gpu.memory_under_limit, LESS_MEMORY),
            Criterion("gate entropy", gates.gate_entropy_healthy, LOOK_AT_LOSS),
            Criterion("gates not collapsed", gates.gates_not_collapsed, LOOK_AT_LOSS),
            Criterion("gates have learned", gates.gates_have_learned, LOOK_AT_LOSS),
            Criterion("selection is healthy", selection.selection_healthy, LOOK_AT_LOSS),
        ),
    ),
    Phase(
        3,
        "production",
        steps=None,
        dataset=None,
        criteria=(
            COMPLETED,
            NO_STALL,
            LOSS_FINITE,
            Criterion("loss is falling", training.loss_falling, LOOK_AT_LOSS),
            Criterion("checkpoint at save_every", checkpoints.first_checkpoint_was_saved, "check the disk's space"),
            Criterion("checkpoints are intact", checkpoints.checkpoints_intact, "remove the damaged one and resume"),
            Criterion("newest checkpoint loads", checkpoints.newest_checkpoint_loads, "resume from an older one"),
            Criterion("watchdog is on", operation.watchdog_was_on, "start through tamis launch"),
            Criterion(
                "TensorBoard and CSV are on", operation.logs_are_on, "unset NSA_TB_DISABLE, NSA_DISABLE_CSV_LOGS"
            ),
        ),
    ),
)
PRODUCTION = PHASES[-1].number


def parse_phase_steps(text: str) -> dict[int, int]:
    """`1,12,20,30`: step counts of phases 0 to 3, for a rehearsal in miniature."""
    counts = text.split(",")
    if len(counts) != len(PHASES) or not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise ConfigError(f"--phase-steps must be {len(PHASES)} counts like 1,300,1000,50000, got {text!r}")
    return {phase.number: int(count) for phase, count in zip(PHASES, counts, strict=True)}


def production_config(config: Config, steps: Mapping[int, int] | None) -> Config:
    """The configuration that phase 3 trains, with its step count of a rehearsal if there is one."""
    if not steps or PRODUCTION not in steps:
        return config
    tree = config.model_dump()
    tree["train"]["tokens"] = None
    _set_steps(tree, steps[PRODUCTION])
    return build_config(tree)


def _set_steps(tree: dict[str, Any], steps: int) -> None:
    tree["train"]["steps"] = steps
    tree["train"]["warmup_steps"] = min(tree["train"]["warmup_steps"], steps)


@dataclass(frozen=True)
class PhaseSettings:
    """Settings that all phases of one launch share."""

    config: Config
    config_path: str
    gpus: Sequence[Gpu]
    processes: int
    estimate_toks_per_s: float | None
    steps: Mapping[int, int]  # step counts that replace a phase's own

    def key(self, phase: Phase) -> str:
        """A hash of everything that could change the outcome of a phase."""
        machine = [f"{gpu.name} {gpu.total_mib}" for gpu in self.gpus]
        parts = [self.config.hash, git_commit(Path.cwd()), machine, self.processes, phase.number, self._steps(phase)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def config_of(self, phase: Phase, out_dir: Path) -> Config:
        tree = self.config.model_dump()
        _set_steps(tree, self._steps(phase))
        tree["train"]["out_dir"] = str(out_dir)
        if phase.dataset:
            tree["data"]["dataset"] = phase.dataset
            tree["runtime"]["production"] = False  # a synthetic step is a test, also before a production run
        return build_config(tree)

    def _steps(self, phase: Phase) -> int:
        return self.steps.get(phase.number, phase.steps or self.config.train.steps)


def launch_by_phases(
    config: Config,
    run_to_end: RunToEnd,
    *,
    config_path: str,
    gpus: Sequence[Gpu],
    processes: int,
    estimate_toks_per_s: float | None = None,
    steps: Mapping[int, int] | None = None,
    repeat: bool = False,
    console: Console | None = None,
) -> int:
    """Run the phases in order; the exit code of the first that does not pass, or that of production."""
    console = console or Console()
    settings = PhaseSettings(config, config_path, gpus, processes, estimate_toks_per_s, steps or {})
    out = RunDirectory(config.train.out_dir).create()
    for phase in PHASES:
        before = None if repeat or phase.number == PRODUCTION else _passed_before(out, settings.key(phase))
        if before:
            console.print(
                f"phase {phase.number} ({phase.title}) passed at {before['judged_at']}, unchanged since", soft_wrap=True
            )
            continue
        code = run_phase(phase, settings, run_to_end, console)
        if code:
            return code
    return ExitCode.DONE


def run_phase(phase: Phase, settings: PhaseSettings, run_to_end: RunToEnd, console: Console) -> int:
    """Run and judge one phase; 0 only if it ended well and no criterion failed."""
    directory = _phase_directory(settings.config, phase).create()
    config = settings.config_of(phase, directory.path)
    console.print(
        f"phase {phase.number}: {phase.title}, {counted(config.train.steps, 'step')} in {directory.path}",
        markup=False,
        soft_wrap=True,
    )
    was_complete = phase.number == PRODUCTION and is_complete(directory, config)  # its records stay as they are
    if not was_complete:
        write_info(directory.run_info, _info(settings, config, directory))
    _point_to(directory, Path(settings.config.train.out_dir))
    code = run_to_end(config)
    if code in STOPPED_BY_REQUEST:
        console.print(f"phase {phase.number} was stopped on request; {_next_launch(phase, directory)}", soft_wrap=True)
        return code
    evidence = read_evidence(directory)
    evidence = evidence if was_complete else replace(evidence, config=config)
    findings = [_ended(code), *(criterion.apply(evidence) for criterion in phase.criteria)]
    print_findings(f"Phase {phase.number}: {phase.title}", findings, console)
    out = RunDirectory(settings.config.train.out_dir)
    _store(out, phase, settings.key(phase), directory, findings)
    words = f"phase {phase.number} ({phase.title}): {verdict(findings)}"
    EventLog(out, by="launch").record("phase_verdict", words, phase=phase.number, go=is_go(findings))
    return code or (ExitCode.CRASH if has_failed(findings) else ExitCode.DONE)


def _point_to(directory: RunDirectory, out: Path) -> None:
    """Let OUT/phases/current lead to the phase under way: its training.csv and heartbeats are there."""
    link = out / "phases" / "current"
    link.parent.mkdir(exist_ok=True)
    fresh = link.with_name(f"current.{os.getpid()}.tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(directory.path, link.parent))
    os.replace(fresh, link)


def _next_launch(phase: Phase, directory: RunDirectory) -> str:
    if phase.number != PRODUCTION:
        return "the next launch repeats this phase"
    steps = directory.checkpoints()
    if not steps:
        return "launch again to start over: there is no checkpoint"
    return f"launch again to resume from {directory.checkpoint(steps[-1]).name}"


def read_go_no_go(out: RunDirectory) -> list[dict[str, Any]]:
    """The records of all phases run here, oldest first; records without all their fields are skipped."""
    try:
        document = read_json(_stem(out).with_suffix(".json"))
    except (OSError, ValueError):
        return []
    records = document.get("phases") if isinstance(document, dict) else None
    return [record for record in records if _is_record(record)] if isinstance(records, list) else []


def _is_record(record: object) -> bool:
    texts = ("title", "directory", "judged_at", "key", "verdict")
    return (
        isinstance(record, dict)
        and isinstance(record.get("phase"), int)
        and "go" in record
        and (isinstance(record.get("findings"), list) and all(isinstance(record.get(name), str) for name in texts))
    )


def _phase_directory(config: Config, phase: Phase) -> RunDirectory:
    """OUT for production; a new directory for each rehearsal, which therefore never resumes."""
    out = Path(config.train.out_dir)
    if phase.number == PRODUCTION:
        return RunDirectory(out)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return RunDirectory(out / "phases" / f"phase{phase.number}_{stamp}_{time.time_ns() % 1000:03d}")


def _info(settings: PhaseSettings, config: Config, directory: RunDirectory) -> dict[str, Any]:
    return describe_run(
        config,
        config_path=settings.config_path,
        run_dir=directory.path,
        gpus=settings.gpus,
        processes=settings.processes,
        command=sys.argv,
        worker_command=trainer_command(directory.config_yaml, settings.processes, None),
        estimate_toks_per_s=settings.estimate_toks_per_s,
    )


def _ended(code: int) -> Finding:
    names = {known.value: known.name.lower() for known in ExitCode}
    status: Literal["pass", "fail"] = "pass" if code == ExitCode.DONE else "fail"
    remedy = "" if code == ExitCode.DONE else "read the end of train.log and events.jsonl"
    return Finding(
        status, f"exit code {code} ({names.get(code, 'crash')})", name="the workers ended well", remedy=remedy
    )


def _passed_before(out: RunDirectory, key: str) -> dict[str, Any] | None:
    records = [record for record in read_go_no_go(out) if record.get("key") == key]
    return records[-1] if records and not has_failed(parse_findings(records[-1]["findings"])) else None


def _store(out: RunDirectory, phase: Phase, key: str, directory: RunDirectory, findings: Sequence[Finding]) -> None:
    record = {
        "phase": phase.number,
        "title": phase.title,
        "directory": str(directory.path),
        "judged_at": utc(),
        "key": key,
        "go": is_go(findings),
        "verdict": verdict(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    records = [*read_go_no_go(out), record]
    write_json_atomic(_stem(out).with_suffix(".json"), {"phases": records})
    write_text_atomic(_stem(out).with_suffix(".txt"), "\n".join(map(_record_text, records)))


def _record_text(record: dict[str, Any]) -> str:
    title = f"Phase {record['phase']}: {record['title']}, judged {record['judged_at']}, in {record['directory']}"
    return findings_text(title, parse_findings(record["findings"]))


def _stem(out: RunDirectory) -> Path:
    return out.path / "go_no_go"
