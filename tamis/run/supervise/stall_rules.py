"""Stall rules as pure functions: the ranks' history, the state of their processes and the limits → alarms.

Each alarm carries its reason and evidence. `escalation.py` acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from tamis.run.files.events import Alarm
from tamis.run.files.lock import ProcessState
from tamis.run.limits import DEAD_AFTER_S, JUDGED_STEPS, SETTLED_STEPS, SLOW_STRETCHES, Limits
from tamis.run.supervise.history import RankHistory, RunHistory

PHASE_ORDER = {"boot": 0, "loader_ready": 1, "compile": 2, "step_start": 3, "progress": 4, "step_end": 5}


def stall_alarms(
    history: RunHistory, processes: Mapping[int, ProcessState], limits: Limits, *, disk_is_full: bool = False
) -> list[Alarm]:
    """Alarms about the ranks' progress: dead, stopped or silent ranks, and slow ones as notes."""
    dead = [alarm for rank in history.ranks.values() if (alarm := _dead(rank, history, processes))]
    if dead:
        return dead  # the other ranks fall silent because of it
    limit = {rank.rank: group_patience(rank, history, limits) for rank in history.ranks.values()}
    silent = [rank for rank in limit if history.silent_s(rank) > limit[rank]]
    if silent and disk_is_full:
        reason = "the disk is full: heartbeats cannot be written, so silence proves nothing; free some space"
        return [Alarm("disk_full", "note", reason, None, _evidence(history, processes))]
    if silent:
        return [_stall(max(silent, key=history.silent_s), limit, history, processes)]
    return [*_stopped(history, processes, limits), *_slow(history, limits), *_slow_ranks(history)]


def patience(rank: RankHistory, limits: Limits) -> float:
    """How long this rank may stay silent where it is now."""
    if rank.last is None:
        return limits.phase_s["boot"]
    phase = rank.last.phase
    if phase in limits.phase_s:
        return limits.phase_s[phase]
    if rank.steps_by_this_process == 0:
        return max(limits.first_step_s, limits.fetch_s)
    settled = rank.in_succession and len(rank.step_times) >= SETTLED_STEPS
    floor_s = min(limits.settled_floor_s, limits.floor_s) if settled else limits.floor_s
    learned = max(floor_s, _many_steps(rank, limits))
    return max(learned, limits.fetch_s) if phase == "step_start" else learned


def _many_steps(rank: RankHistory, limits: Limits) -> float:
    """Many times the steps seen so far; after the very first step, a multiple of that one."""
    if not rank.step_times:
        return limits.times_longest * rank.first_step_s
    return max(limits.times_typical * median(rank.step_times), limits.times_longest * max(rank.step_times))


def _dead(rank: RankHistory, history: RunHistory, processes: Mapping[int, ProcessState]) -> Alarm | None:
    if processes.get(rank.rank) != "dead" or rank.last is None or rank.last.is_final:
        return None
    if rank.dead_at is None or history.awake_s - rank.dead_at < DEAD_AFTER_S:
        return None
    where = f"{rank.last.phase} of step {rank.last.step}"
    reason = f"rank {rank.rank} (pid {rank.last.pid}) is dead: its process ended during {where}"
    return Alarm("dead_rank", "stall", reason, rank.rank, _evidence(history, processes))


def _stopped(history: RunHistory, processes: Mapping[int, ProcessState], limits: Limits) -> list[Alarm]:
    """Report a stopped process long before its silence becomes a stall."""
    stopped = [rank for rank in history.ranks if processes.get(rank) == "stopped"]
    return [
        Alarm("stopped_rank", "note", f"rank {rank} is stopped (SIGSTOP or a debugger); kill -CONT resumes it", rank)
        for rank in stopped
        if history.silent_s(rank) > limits.stopped_s
    ]


def group_patience(rank: RankHistory, history: RunHistory, limits: Limits) -> float:
    """How long this rank may stay silent while another one saves, evaluates or compiles, which it waits for."""
    phases = [other.last.phase for other in history.ranks.values() if other.last and not other.last.is_final]
    return max(patience(rank, limits), *(limits.phase_s.get(phase, 0.0) for phase in phases), 0.0)


def _stall(silent: int, limit: dict[int, float], history: RunHistory, processes: Mapping[int, ProcessState]) -> Alarm:
    culprit = _furthest_behind(history)
    kind, cause = _cause(culprit, history, processes)
    seconds = history.silent_s(silent)
    evidence = _evidence(history, processes) | {"silent_s": round(seconds, 1), "limit_s": round(limit[silent], 1)}
    reason = f"no progress for {seconds:.0f} s (limit {limit[silent]:.0f} s): {cause}"
    return Alarm(kind, "stall", reason, culprit.rank if culprit else None, evidence)


def _cause(culprit: RankHistory | None, history: RunHistory, processes: Mapping[int, ProcessState]) -> tuple[str, str]:
    """The kind of stall, as a word and as a sentence."""
    stopped = [rank for rank in history.ranks if processes.get(rank) == "stopped"]
    if stopped:
        return "stopped_rank", f"rank {stopped[0]} is stopped (SIGSTOP or a debugger), the others wait for it"
    if culprit is None:
        step = max(rank.last.step for rank in history.ranks.values() if rank.last)
        return "stuck_in_collective", f"all {len(history.ranks)} ranks are inside step {step}: stuck in a collective"
    if culprit.last is None:
        return "stuck_at_start", f"rank {culprit.rank} has not sent a first heartbeat"
    who, phase, step = f"rank {culprit.rank}", culprit.last.phase, culprit.last.step
    others = ", the others wait for it in a collective" if len(history.ranks) > 1 else ""
    if culprit.last.is_final:
        return "stuck_at_exit", f"{who} reported {phase} at step {step}, and its group has not ended"
    if phase in ("loader_ready", "step_start"):
        return "starved_of_data", f"{who} waits for the batch of step {step}{others}: starved of data"
    if phase == "progress":
        return "stuck_in_compute", f"{who} is inside forward or backward of step {step}{others}"
    return f"stuck_in_{phase}", f"{who} is stuck in {phase} at step {step}{others}"


def _furthest_behind(history: RunHistory) -> RankHistory | None:
    """The rank that the others wait for; None when all of several ranks are inside the computation of the same step."""
    positions = {rank.rank: _position(rank) for rank in history.ranks.values()}
    behind = min(positions.values())
    all_together = len(positions) > 1 and len(set(positions.values())) == 1
    if all_together and behind[1] == PHASE_ORDER["progress"]:
        return None
    return next(history.ranks[rank] for rank, position in positions.items() if position == behind)


def _position(rank: RankHistory) -> tuple[int, int]:
    return (rank.last.step, PHASE_ORDER.get(rank.last.phase, 6)) if rank.last else (-1, -1)


def _slow(history: RunHistory, limits: Limits) -> list[Alarm]:
    """Compare the run with its own median speed over stretches of half a minute: a short pause is no collapse."""
    rank = max(history.ranks.values(), key=lambda rank: len(rank.stretches), default=None)
    if rank is None or rank.stretches_of_this_process < SLOW_STRETCHES:
        return []
    earlier, recent = list(rank.stretches)[:-SLOW_STRETCHES], min(list(rank.stretches)[-SLOW_STRETCHES:])
    usual = median(earlier) if len(earlier) >= SLOW_STRETCHES else limits.expected_step_s
    if usual is None:
        return []
    evidence = {"recent_step_s": round(recent, 4), "usual_step_s": round(usual, 4), "stretches": SLOW_STRETCHES}
    words = f"steps have taken {recent:.3g} s or more for minutes, {usual:.3g} s is usual"
    if usual < limits.throughput_collapse * recent:
        return [Alarm("throughput_collapse", "stall", f"{words}: throughput has collapsed", None, evidence)]
    if usual < limits.slow_share * recent:
        return [Alarm("slow", "note", f"{words}: slow; it goes on", None, evidence)]
    return []


def _slow_ranks(history: RunHistory) -> list[Alarm]:
    """Name a rank that fetches or computes far longer than the others: it slows them all. It is not killed."""
    alarms = []
    for what, words in (("dt_fetch_s", "waits for data"), ("dt_forward_s", "computes its forward pass")):
        typical = {
            r.rank: value for r in history.ranks.values() if (value := r.typical(what, JUDGED_STEPS)) is not None
        }
        step_s = max((median(r.step_times) for r in history.ranks.values() if r.step_times), default=math.inf)
        for rank, value in typical.items():
            others = [v for other, v in typical.items() if other != rank]
            if others and value > 3 * max(others) and value > 0.2 * step_s:
                reason = f"rank {rank} {words} for {value:.3g} s per step, the others at most {max(others):.3g} s"
                alarms.append(Alarm("slow_rank", "note", reason, rank, {what: typical}))
    return alarms + _starved(history)


def _starved(history: RunHistory) -> list[Alarm]:
    """Report a rank that spends more than half of each step waiting for data; no reason to stop."""
    for rank in history.ranks.values():
        fetch = rank.typical("dt_fetch_s", JUDGED_STEPS)
        if fetch is not None and len(rank.step_times) >= JUDGED_STEPS and fetch > 0.5 * median(rank.step_times) > 0:
            share = min(1.0, fetch / median(rank.step_times))
            reason = f"rank {rank.rank} spends {share:.0%} of each step waiting for data ({fetch:.3g} s)"
            return [Alarm("starved_of_data", "note", reason, rank.rank, {"dt_fetch_s": fetch})]
    return []


def _evidence(history: RunHistory, processes: Mapping[int, ProcessState]) -> dict[str, Any]:
    return {
        "ranks": {
            str(rank.rank): {
                "step": rank.last.step if rank.last else None,
                "phase": rank.last.phase if rank.last else None,
                "pid": rank.last.pid if rank.last else None,
                "process": processes.get(rank.rank, "unknown"),
                "silent_s": round(history.silent_s(rank.rank), 1),
            }
            for rank in history.ranks.values()
        }
    }
