"""State of each rank from its last heartbeat, and state of the whole run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.lock import ProcessId, RunLock
from tamis.run.files.reading import read_json

State = Literal["missing", "starting", "running", "crashed", "restarting", "done", "halted", "failed"]

STATE_AFTER: dict[int | None, State] = {  # a launch that left no heartbeat; any other exit code is a failure
    ExitCode.DONE: "done",
    ExitCode.HALTED: "halted",
    ExitCode.PREEMPTED: "halted",
    ExitCode.COST_LIMIT: "halted",
}
EVENTS_READ = 20
JUST_CREATED_S = 2.0  # of a lock file: a launch takes it within milliseconds
REMOTE_SILENCE_S = 3600.0  # a process of another host that is silent for longer counts as ended


@dataclass(frozen=True)
class RankView:
    rank: int
    pid: int
    step: int
    phase: str
    age_s: float  # since its last beat
    is_alive: bool  # the process still exists
    mem_alloc_gib: float | None
    mem_reserved_gib: float | None
    detail: str | None


def rank_view(rank: int, beats: list[Heartbeat], now: float) -> RankView:
    beat = beats[-1]
    age_s = max(0.0, now - beat.ts)
    measured = next((b for b in reversed(beats) if b.gpu_mem_alloc_gib is not None), beat)
    return RankView(
        rank=rank,
        pid=beat.pid,
        step=beat.step,
        phase=beat.phase,
        age_s=age_s,
        is_alive=_is_alive(beat, age_s),
        mem_alloc_gib=measured.gpu_mem_alloc_gib,
        mem_reserved_gib=measured.gpu_mem_reserved_gib,
        detail=beat.detail,
    )


ACTIVITIES = {  # {step}: the step a phase belongs to
    "boot": "starting",
    "loader_ready": "waiting for the first batch",
    "compile": "compiling",
    "step_start": "fetching the batch of step {step}",
    "progress": "training step {step}",
    "step_end": "finished step {step}",
    "eval": "evaluating at step {step}",
    "checkpoint": "saving at step {step}",
}


def activity(phase: str, step: int) -> str:
    """A heartbeat phase in words, as `training step 38`."""
    return ACTIVITIES.get(phase, phase + " at step {step}").format(step=step)


def state_of(directory: RunDirectory, ranks: list[RankView]) -> tuple[State, str]:
    """State of the run in a word and in a sentence."""
    if not ranks:
        return _before_the_first_beat(directory)
    phases = {rank.phase for rank in ranks}
    where = f"step {min(rank.step for rank in ranks)}"
    if "failed" in phases:
        culprit = next(rank for rank in ranks if rank.phase == "failed")
        return "failed", f"rank {culprit.rank} failed at {where}: {culprit.detail or 'see train.log'}"
    if phases == {"done"}:
        return "done", f"all steps are done, {where}"
    if phases == {"halted"}:
        return "halted", f"halted at {where}{_how_to_resume(directory)}"
    if not any(rank.is_alive for rank in ranks):
        if _owner_lives(directory) and not _has_given_up(directory):
            return "restarting", f"no worker is alive after {where}; the launch is starting new ones"
        return "crashed", f"no worker is alive after {where}{_how_to_resume(directory)}"
    return "running", activity(ranks[0].phase, min(rank.step for rank in ranks))


def _before_the_first_beat(directory: RunDirectory) -> tuple[State, str]:
    ended = _end_without_a_beat(directory)  # first: a launch that begins meanwhile holds a lock below
    if _owner_lives(directory) or RunLock(directory.trainer_lock).is_held():
        return "starting", "no heartbeat yet: the launch is running its checks or starting workers"
    return ended


def _end_without_a_beat(directory: RunDirectory) -> tuple[State, str]:
    """How the last launch ended, where none is under way."""
    if any(RunLock(lock).owner() is not None for lock in (directory.lock, directory.launch_lock)):
        return "crashed", f"the launch was killed before the first heartbeat{_how_to_resume(directory)}"
    preflight, end = _last_preflight(directory), _last_end(directory)
    sentence = f"no heartbeat yet, and no launch is under way here{preflight}"
    if "NO-GO" in preflight and (end is None or end["ts"] < _preflight(directory).stat().st_mtime):
        return "failed", sentence
    if end is not None:
        state = STATE_AFTER.get(end["evidence"].get("exit_code"), "failed")
        return state, f"{end['reason']}, before the first heartbeat{_how_to_resume(directory)}"
    if any(_is_released(lock) for lock in (directory.lock, directory.launch_lock)):
        return "failed", f"the launch ended before the first heartbeat; its log has the reason{preflight}"
    return "starting", sentence


def _is_released(lock: Path) -> bool:
    """True for a lock file that no launch has just created, and is about to take."""
    try:
        return time.time() - lock.stat().st_mtime > JUST_CREATED_S
    except OSError:
        return False


def _last_end(directory: RunDirectory) -> dict[str, Any] | None:
    """The newest end of a launch; events about messages and costs may follow it."""
    return next((event for event in reversed(read_events(directory, EVENTS_READ)) if event["event"] == "end"), None)


def _preflight(directory: RunDirectory) -> Path:
    return directory.path / "preflight.json"


def _last_preflight(directory: RunDirectory) -> str:
    try:
        verdict = read_json(_preflight(directory))["verdict"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return f"; the last preflight was {verdict}"


def _how_to_resume(directory: RunDirectory) -> str:
    steps = directory.checkpoints()
    if not steps:
        return "; there is no checkpoint, so a new launch starts at step 1"
    return f", with a checkpoint of step {steps[-1]}; launch again to resume"


def _owner_lives(directory: RunDirectory) -> bool:
    """True if a supervisor, or a launch still at its checks or phases, holds the directory."""
    return any(RunLock(lock).is_held() for lock in (directory.lock, directory.launch_lock))


def _has_given_up(directory: RunDirectory) -> bool:
    """True if the supervisor's last word is the end; the launch may still be writing its report."""
    events = read_events(directory, 1)
    return bool(events) and events[-1]["event"] == "end"


def _is_alive(beat: Heartbeat, age_s: float) -> bool:
    """True if the process runs on this host; on another one, while its last heartbeat is recent."""
    process = ProcessId.recorded(beat.pid, beat.started, beat.host)
    if process.state() == "unknown" and beat.host is not None:
        return age_s < REMOTE_SILENCE_S
    return process.is_alive()
