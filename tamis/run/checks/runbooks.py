"""`tamis judge RUN`: the success criteria of the operator's runbooks, judged from the run directory alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tamis.config import ConfigError, load_config
from tamis.run.checks import criteria, criteria_device, criteria_supervision
from tamis.run.checks.evidence import Evidence, read_evidence
from tamis.run.checks.findings import (
    Criterion,
    Finding,
    failed,
    has_failed,
    not_measured,
    passed,
    print_findings,
    utc,
    write_findings,
)
from tamis.run.files.directory import RunDirectory
from tamis.run.find import existing_run
from tamis.run.phase_runner import read_go_no_go
from tamis.run.phases import PHASES

LEAST_TOKENS_PER_S = 39  # the launch plan's floor; a real run of M7C is thousands of times above it


@dataclass(frozen=True)
class Runbook:
    title: str
    criteria: tuple[Criterion, ...]


def within(steps: int, judge: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
    """The criterion as it stood when `steps` were done."""

    def judge_window(evidence: Evidence) -> Finding:
        if evidence.last_step < steps:
            return not_measured(_before(steps, evidence))
        return judge(evidence.until(steps))

    return judge_window


def _before(steps: int, evidence: Evidence) -> str:
    planned = evidence.config.train.steps if evidence.config else None
    if planned is not None and planned < steps:
        return f"the run has {planned} steps in all, fewer than {steps}"
    return f"the run is at step {evidence.last_step}, before step {steps}"


def phase_passed(number: int) -> Callable[[Evidence], Finding]:
    def judge(evidence: Evidence) -> Finding:
        records = [r for r in read_go_no_go(evidence.directory) if r.get("phase") == number]
        if not records:
            return not_measured(f"phase {number} was not run here (tamis launch --phases runs it)")
        sentence = f"{records[-1]['verdict']} at {records[-1]['judged_at']} in {records[-1]['directory']}"
        if not records[-1]["go"]:
            return failed(sentence)
        done, wanted = _steps_of(records[-1]["directory"]), PHASES[number].steps
        if done is None or (wanted is not None and done < wanted):
            return not_measured(f"a rehearsal of {done} steps, {wanted} are asked for: {sentence}")
        return passed(f"{done} steps, {sentence}")

    return judge


def _steps_of(directory: str) -> int | None:
    """Steps a phase was launched with; None when its config is gone."""
    try:
        return load_config(RunDirectory(directory).config_yaml).train.steps
    except ConfigError:
        return None


def throughput_over_floor(evidence: Evidence) -> Finding:
    measured = criteria.typical_throughput(evidence)
    if measured is None:
        return failed("no throughput was recorded")
    sentence = f"median {measured:,.0f} tok/s, at least {LEAST_TOKENS_PER_S}"
    return passed(sentence) if measured >= LEAST_TOKENS_PER_S else failed(sentence)


RUNBOOKS = (
    Runbook(
        "Pilot (runbook 0)",
        (
            Criterion("trains for at least two hours", criteria_supervision.ran_long_enough),
            Criterion("no out-of-memory, CUDA or NCCL error", criteria_supervision.no_cuda_or_nccl_errors),
            Criterion("no hang", criteria_supervision.no_alarms),
            Criterion("loss is falling", criteria.loss_falling),
            Criterion("throughput is reported and stable", criteria.throughput_stable),
            Criterion("checkpoints are saved and intact", criteria_device.checkpoints_intact),
            Criterion("resume from a checkpoint succeeded", criteria_supervision.resume_succeeded),
        ),
    ),
    Runbook(
        "Launch plan (runbook 1)",
        (
            Criterion(
                "first 100 steps: starts without errors", within(100, criteria_supervision.started_without_errors)
            ),
            Criterion("first 100 steps: throughput", within(100, throughput_over_floor)),
            Criterion("first 100 steps: loss is falling", within(100, criteria.loss_falling)),
            Criterion("no CUDA or NCCL errors", criteria_supervision.no_cuda_or_nccl_errors),
            Criterion("first 500 steps: stable throughput", within(500, criteria.throughput_stable)),
            Criterion("first 500 steps: memory under the limit", within(500, criteria_device.memory_under_limit)),
            Criterion("first 500 steps: gate entropy", within(500, criteria_device.gate_entropy_healthy)),
            Criterion("first 500 steps: gates not collapsed", within(500, criteria_device.gates_not_collapsed)),
            Criterion("first 500 steps: no watchdog triggers", within(500, criteria_supervision.no_alarms)),
            Criterion("first checkpoint at save_every", criteria_device.first_checkpoint_was_saved),
            Criterion("newest checkpoint can be loaded", criteria_device.newest_checkpoint_loads),
        ),
    ),
    Runbook(
        "Production (runbook 2)",
        (
            Criterion("phase 0: wiring, heartbeats present", phase_passed(0)),
            Criterion("phase 1: no stall, finite, steady, balanced", phase_passed(1), is_needed=True),
            Criterion("phase 2: longer, memory stable", phase_passed(2), is_needed=True),
            Criterion("heartbeats show the phases of a step on every rank", criteria.heartbeats_on_every_rank),
            Criterion("loss is finite", criteria.loss_finite),
            Criterion("memory is stable", criteria_device.memory_flat),
            Criterion("watchdog is on", criteria_supervision.watchdog_was_on),
        ),
    ),
)


def judge(run_dir: str | Path, *, console: Console | None = None) -> int:
    """Print and store every runbook's table. 0: nothing failed; 1: something did. Raises NoSuchRun."""
    console, directory = console or Console(), existing_run(run_dir)
    console.print(f"reading {directory.path}; sums of all checkpoints, and the newest is loaded …", soft_wrap=True)
    results = judge_runbooks(read_evidence(directory))
    for title, findings in results.items():
        print_findings(title, findings, console)
    every = [finding for findings in results.values() for finding in findings]
    write_findings(directory.path / "judgement", f"Success criteria of {directory.path}", every)
    return 1 if has_failed(every) else 0


def judge_runbooks(evidence: Evidence) -> dict[str, list[Finding]]:
    return {book.title: [criterion.apply(evidence) for criterion in book.criteria] for book in RUNBOOKS}


def span(evidence: Evidence) -> str:
    """When the run's heartbeats began and ended."""
    times = [beat.ts for beats in evidence.beats.values() for beat in (beats[:1] + beats[-1:])]
    return f"{utc(min(times))} to {utc(max(times))}" if times else "no heartbeat"
