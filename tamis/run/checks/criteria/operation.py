"""Criteria on the operation of a run: alarms, watchdog, errors in the log, logs, duration, resumption."""

from __future__ import annotations

import re
from itertools import pairwise

from tamis.config import Config
from tamis.run.checks.criteria.training import completed
from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, failed, not_applicable, not_measured, pass_if, passed
from tamis.run.files.console import counted
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.lock import RunLock
from tamis.run.files.reading import read_last_lines
from tamis.run.files.records import utc
from tamis.run.limits import PILOT_HOURS

MOST_LOG_BYTES = 256 << 20
ERRORS_IN_LOG = re.compile(
    rb"CUDA error|CUDA out of memory|OutOfMemoryError|NCCL error|ncclSystemError|ncclUnhandledCudaError"
    rb"|DistBackendError"
)


def no_alarms(evidence: Evidence) -> Finding:
    """Require that no alarm stopped the run."""
    if not evidence.events:
        return not_measured("no events.jsonl: this run had no supervisor and no watchdog")
    alarms = [event for event in evidence.events if event["evidence"].get("severity") in ("halt", "stall")]
    if alarms:
        return failed(f"{alarms[0]['event']} at {utc(alarms[0]['ts'])}: {alarms[0]['reason']}", at=alarms[0]["ts"])
    return passed(f"{len(evidence.events)} events, no alarm among them", evidence.events[-1]["ts"])


def watchdog_was_on(evidence: Evidence) -> Finding:
    """Accept a supervisor whose start event has `watch` set, or a separate watchdog's own events."""
    watched = [event for event in evidence.events if event.get("by") == "watchdog" or event["evidence"].get("watch")]
    if not watched:
        return failed("no supervisor or watchdog that watches wrote to events.jsonl")
    return passed(f"{watched[0]['by']} since {utc(watched[0]['ts'])}", watched[0]["ts"])


def started_without_errors(evidence: Evidence) -> Finding:
    if not evidence.last_beat:
        return failed("no heartbeat was written")
    bad = next((beat for beats in evidence.beats.values() for beat in beats if beat.phase == "failed"), None)
    if bad:
        return failed(f"rank {bad.rank} failed at step {bad.step}: {bad.detail or 'no detail'}", at=bad.ts)
    return pass_if(
        evidence.last_step > 0, f"{counted(evidence.last_step, 'step')} and no failed phase", evidence.last_beat.ts
    )


def no_cuda_or_nccl_errors(evidence: Evidence) -> Finding:
    if not evidence.logs:
        return not_measured("there is no train.log")
    count = 0
    for path in evidence.logs:
        for line in read_last_lines(path, MOST_LOG_BYTES):
            count += 1
            if match := ERRORS_IN_LOG.search(line):
                around = line[max(0, match.start() - 60) : match.end() + 100]
                return failed(f"{path.parent.name}/{path.name}: {around.decode(errors='replace').strip()}")
    return passed(f"none in {count} lines of {counted(len(evidence.logs), 'log')}")


def logs_are_on(evidence: Evidence) -> Finding:
    """Require the logs that the config asks for: training.csv, TensorBoard or both."""
    train = (evidence.config or Config()).train
    if not train.csv and not train.tensorboard:
        return not_applicable("train.csv and train.tensorboard are off")
    files = list(evidence.directory.tensorboard.glob("events.out.tfevents.*"))
    board, rows = sum(path.lstat().st_size for path in files), len(evidence.training)
    sentence = f"training.csv {rows} rows" if train.csv else "training.csv off"
    sentence += f", TensorBoard {board} bytes" if train.tensorboard else ", TensorBoard off"
    return pass_if((rows > 0 or not train.csv) and (board > 0 or not train.tensorboard), sentence)


def ran_long_enough(evidence: Evidence) -> Finding:
    """Require two hours of a pilot on GPUs, not of a run on the CPU or of a production run that did all its steps."""
    if not evidence.hours_by_step:
        return failed("no step was finished")
    hours = evidence.hours_by_step[-1][1]
    sentence = f"{hours:.2f} hours of steps, at least {PILOT_HOURS:g}"
    if hours < PILOT_HOURS and not evidence.uses_gpus:
        return not_applicable(f"{sentence} are asked of a pilot on GPUs, and this run was on the CPU")
    production = evidence.config is not None and evidence.config.runtime.production
    if hours < PILOT_HOURS and production and completed(evidence).status == "pass":
        return not_applicable(f"{sentence} are asked of a pilot, and this production run did all its steps sooner")
    if hours < PILOT_HOURS and RunLock(evidence.directory.trainer_lock).is_held():
        return not_measured(f"{sentence}, and it is still running: judge it again later")
    return pass_if(hours >= PILOT_HOURS, sentence)


def resume_succeeded(evidence: Evidence) -> Finding:
    """Require a later process that continued after an earlier one's steps, not at step 1."""
    firsts = _first_steps_by_process(evidence.step_ends.get(0, []))
    later = [beat for beat in firsts[1:] if beat.step > 1]
    if later:
        return passed(f"a new process continued at step {later[-1].step}", later[-1].ts)
    if len(firsts) > 1:
        return failed(f"{len(firsts)} processes, each began at step 1")
    if evidence.is_showcase:
        return not_applicable("never interrupted; a resume is asked of runs on GPUs")
    return not_measured("this run was never interrupted and resumed")


def _first_steps_by_process(ends: list[Heartbeat]) -> list[Heartbeat]:
    return [beat for before, beat in pairwise([None, *ends]) if beat and (before is None or before.pid != beat.pid)]
