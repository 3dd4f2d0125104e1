"""`tamis judge RUN`: judge a run by the success criteria of the runbooks, from its directory alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tamis.config import ConfigError, load_config
from tamis.run.checks.criteria import checkpoints, gates, gpu, operation, training
from tamis.run.checks.evidence import Evidence, read_evidence
from tamis.run.checks.findings import (
    Criterion,
    Finding,
    failed,
    has_failed,
    not_applicable,
    not_measured,
    parse_findings,
    passed,
    print_findings,
    write_findings,
)
from tamis.run.file_problems import file_problems
from tamis.run.files.console import counted, printable_line
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import optional_write
from tamis.run.locate import existing_run
from tamis.run.phases import PHASES, read_go_no_go


@dataclass(frozen=True)
class Runbook:
    title: str
    criteria: tuple[Criterion, ...]


def within(steps: int, measure: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
    """Apply a criterion to the run as it was when `steps` were done."""

    def measure_beginning(evidence: Evidence) -> Finding:
        if evidence.last_step < steps:
            return _before(steps, evidence)
        return measure(evidence.until(steps))

    return measure_beginning


def _before(steps: int, evidence: Evidence) -> Finding:
    planned = evidence.planned_steps
    if planned is not None and planned < steps:
        return not_applicable(f"the run has {counted(planned, 'step')} in all, fewer than {steps}")
    return not_measured(f"the run is at step {evidence.last_step}, before step {steps}")


def phase_passed(number: int) -> Callable[[Evidence], Finding]:
    """Require a recorded GO of a launch phase, run with its full number of steps."""

    def measure(evidence: Evidence) -> Finding:
        records = [r for r in read_go_no_go(evidence.directory) if r.get("phase") == number]
        if not records and evidence.is_showcase:
            return not_applicable("phases are asked of runs on GPUs and of production")
        if not records:
            return not_measured(f"phase {number} was not run here (tamis launch --phases runs it)")
        last = records[-1]
        sentence = f"{last['verdict']} at {last['judged_at']} in {last['directory']}"
        if has_failed(parse_findings(last["findings"])):
            return failed(sentence)
        if not last["go"]:
            return not_measured(sentence)
        done, wanted = _steps_of(last["directory"]), PHASES[number].steps
        if done is None:
            return not_measured(f"its config.yaml is gone or cannot be read: {sentence}")
        if wanted is not None and done < wanted:
            return not_measured(f"run with {counted(done, 'step')} only, {wanted} are required: {sentence}")
        return passed(f"{counted(done, 'step')}, {sentence}")

    return measure


def _steps_of(directory: str) -> int | None:
    """Number of steps a phase was launched with; None when its config cannot be read."""
    try:
        return load_config(RunDirectory(directory).config_yaml).train.steps
    except ConfigError:
        return None


RUNBOOKS = (
    Runbook(
        "Goals of every run",
        (
            Criterion("all steps are done", training.goal_reached),
            Criterion("loss is finite", training.loss_finite),
            Criterion("loss is falling", training.loss_falling),
            Criterion("no alarm stopped the run", operation.no_alarms),
            Criterion("the logs that the config asks for are written", operation.logs_are_on),
        ),
    ),
    Runbook(
        "Pilot (runbook 0)",
        (
            Criterion("trains for at least two hours", operation.ran_long_enough),
            Criterion("no out-of-memory, CUDA or NCCL error", operation.no_cuda_or_nccl_errors),
            Criterion("no hang", operation.no_alarms),
            Criterion("loss is falling", training.loss_falling),
            Criterion("throughput is reported and stable", training.throughput_stable),
            Criterion("checkpoints are saved and intact", checkpoints.checkpoints_intact),
            Criterion("resume from a checkpoint succeeded", operation.resume_succeeded),
        ),
    ),
    Runbook(
        "Launch plan (runbook 1)",
        (
            Criterion("first 100 steps: starts without errors", within(100, operation.started_without_errors)),
            Criterion("first 100 steps: throughput", within(100, training.throughput_over_floor)),
            Criterion("first 100 steps: loss is falling", within(100, training.loss_falling)),
            Criterion("no CUDA or NCCL errors", operation.no_cuda_or_nccl_errors),
            Criterion("first 500 steps: stable throughput", within(500, training.throughput_stable)),
            Criterion("first 500 steps: memory under the limit", within(500, gpu.memory_under_limit)),
            Criterion("first 500 steps: gate entropy", within(500, gates.gate_entropy_healthy)),
            Criterion("first 500 steps: gates not collapsed", within(500, gates.gates_not_collapsed)),
            Criterion("first 500 steps: no watchdog triggers", within(500, operation.no_alarms)),
            Criterion("first checkpoint at save_every", checkpoints.first_checkpoint_was_saved),
            Criterion("newest checkpoint can be loaded", checkpoints.newest_checkpoint_loads),
        ),
    ),
    Runbook(
        "Production (runbook 2)",
        (
            Criterion("phase 0: wiring, heartbeats present", phase_passed(0)),
            Criterion("phase 1: no stall, finite, steady, balanced", phase_passed(1)),
            Criterion("phase 2: longer, memory stable", phase_passed(2)),
            Criterion("heartbeats show the phases of a step on every rank", training.heartbeats_on_every_rank),
            Criterion("loss is finite", training.loss_finite),
            Criterion("memory is stable", gpu.memory_flat),
            Criterion("watchdog is on", operation.watchdog_was_on),
        ),
    ),
)


def judge_run(run_dir: str | Path, *, console: Console | None = None) -> int:
    """Print and store every runbook's table. Returns 1 if a criterion failed, else 0. Raises NoSuchRun."""
    console, directory = console or Console(), existing_run(run_dir)
    console.print(
        f"reading {printable_line(directory.path)}: checking all checkpoint sums and loading the newest …",
        soft_wrap=True,
        markup=False,
    )
    for problem in file_problems(directory):
        console.print(f"unreadable file: {printable_line(problem)}", soft_wrap=True, markup=False, highlight=False)
    results = judge_runbooks(read_evidence(directory))
    for title, findings in results.items():
        print_findings(title, findings, console)
    every = [finding for findings in results.values() for finding in findings]
    with optional_write():
        write_findings(directory.path / "judgement", f"Success criteria of {directory.path}", every)
    console.print(summary(every), soft_wrap=True, markup=False, highlight=False)
    return 1 if has_failed(every) else 0


def judge_runbooks(evidence: Evidence) -> dict[str, list[Finding]]:
    """Findings by runbook title."""
    return {book.title: [criterion.apply(evidence) for criterion in book.criteria] for book in RUNBOOKS}


def summary(findings: Sequence[Finding]) -> str:
    """The outcome of all criteria in one sentence."""
    by_status = {
        status: [f.name for f in findings if f.status == status] for status in ("pass", "fail", "not measured")
    }
    passed_count, failures, open_lines = map(len, by_status.values())
    if failures:
        return f"not successful: {_criteria(failures)} failed: {'; '.join(dict.fromkeys(by_status['fail']))}"
    if open_lines or not passed_count:
        were = "was" if open_lines == 1 else "were"
        return f"open: {_criteria(passed_count)} passed, {open_lines} {were} not measured"
    return f"success: all {passed_count} criteria that apply to this run passed"


def _criteria(count: int) -> str:
    return "1 criterion" if count == 1 else f"{count} criteria"
