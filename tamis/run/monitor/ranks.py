"""State of each rank from its last heartbeat, and state of the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.lock import ProcessId, RunLock
from tamis.run.files.reading import read_json

State = Literal["missing", "starting", "running", "crashed", "restarting", "done", "halted", "failed"]

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
        return "starting", _before_the_first_beat(directory)
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


def _before_the_first_beat(directory: RunDirectory) -> str:
    if _owner_lives(directory):
        return "no heartbeat yet: the launch is running its checks or starting workers"
    return f"no heartbeat yet, and no launch is under way here{_last_preflight(directory)}"


def _last_preflight(directory: RunDirectory) -> str:
    try:
        verdict = read_json(directory.path / "preflight.json")["verdict"]
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
