"""Criteria on how a run went as an operation: alarms, errors in the log, length, resumption. From artifacts alone."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, failed, judged, not_measured, passed, utc
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.lock import RunLock

PILOT_HOURS = 2.0
ERRORS_IN_LOG = re.compile(
    r"CUDA error|CUDA out of memory|OutOfMemoryError|NCCL error|ncclSystemError|ncclUnhandledCudaError|DistBackendError"
)


def no_alarms(evidence: Evidence) -> Finding:
    """The watchdog saw nothing that made it stop the run."""
    if not evidence.events:
        return not_measured("no events.jsonl: nobody watched this run")
    alarms = [event for event in evidence.events if _details(event).get("severity") in ("halt", "stall")]
    if alarms:
        return failed(f"{alarms[0]['event']} at {utc(alarms[0]['ts'])}: {alarms[0]['reason']}", at=alarms[0]["ts"])
    return passed(f"{len(evidence.events)} events, no alarm among them", evidence.events[-1]["ts"])


def watchdog_was_on(evidence: Evidence) -> Finding:
    """A supervisor that watches says so when it starts workers; a watchdog of its own writes under its own name."""
    watched = [event for event in evidence.events if event.get("by") == "watchdog" or _details(event).get("watch")]
    if not watched:
        return failed("no supervisor or watchdog that watches wrote to events.jsonl")
    return passed(f"{watched[0]['by']} since {utc(watched[0]['ts'])}", watched[0]["ts"])


def started_without_errors(evidence: Evidence) -> Finding:
    if not evidence.last_beat:
        return failed("no heartbeat was written")
    bad = next((beat for beats in evidence.beats.values() for beat in beats if beat.phase == "failed"), None)
    if bad:
        return failed(f"rank {bad.rank} failed at step {bad.step}: {bad.detail or 'no detail'}", at=bad.ts)
    return judged(evidence.last_step > 0, f"{evidence.last_step} steps and no failed phase", evidence.last_beat.ts)


def no_cuda_or_nccl_errors(evidence: Evidence) -> Finding:
    if not evidence.logs:
        return not_measured("there is no train.log")
    count = 0
    for path in evidence.logs:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                count += 1
                if ERRORS_IN_LOG.search(line):
                    return failed(f"{path.parent.name}/{path.name}: {line.strip()[:160]}")
    return passed(f"none in {count} lines of {len(evidence.logs)} log(s)")


def ran_long_enough(evidence: Evidence) -> Finding:
    """Asked of the pilot, a run on GPUs; a showcase of a minute, or a run that still goes on, has not broken it."""
    hours = trained_hours(evidence)
    if hours is None:
        return failed("no step was finished")
    sentence = f"{hours:.2f} hours of steps, at least {PILOT_HOURS:g}"
    if hours < PILOT_HOURS and not ran_on_gpus(evidence):
        return not_measured(f"{sentence} are asked of a pilot on GPUs, and this run was on the CPU")
    if hours < PILOT_HOURS and RunLock(evidence.directory.trainer_lock).is_held():
        return not_measured(f"{sentence}, and it is still running: judge it again later")
    return judged(hours >= PILOT_HOURS, sentence)


def ran_on_gpus(evidence: Evidence) -> bool:
    """By the heartbeats: what the machine had is not always what the run used."""
    return any(beat.gpu_mem_alloc_gib is not None for beats in evidence.step_ends.values() for beat in beats)


def trained_hours(evidence: Evidence) -> float | None:
    """From the first finished step to the last, pauses between two processes left out."""
    ends = evidence.step_ends.get(0, [])
    if not ends:
        return None
    return sum(b.ts - a.ts for a, b in pairwise(ends) if a.pid == b.pid) / 3600


def resume_succeeded(evidence: Evidence) -> Finding:
    """A later process went on after the steps of an earlier one, and did not start again at step 1."""
    firsts = _first_steps_by_process(evidence.step_ends.get(0, []))
    later = [beat for beat in firsts[1:] if beat.step > 1]
    if later:
        return passed(f"a new process went on at step {later[-1].step}", later[-1].ts)
    if len(firsts) > 1:
        return failed(f"{len(firsts)} processes, each began at step 1")
    return not_measured("this run was never interrupted and resumed")


def _first_steps_by_process(ends: list[Heartbeat]) -> list[Heartbeat]:
    return [beat for before, beat in pairwise([None, *ends]) if beat and (before is None or before.pid != beat.pid)]


def _details(event: dict[str, Any]) -> dict[str, Any]:
    details = event.get("evidence")
    return details if isinstance(details, dict) else {}
