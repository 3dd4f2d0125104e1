"""Each rank's last sign of life, and what the run as a whole is doing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import psutil

from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.lock import RunLock

State = Literal["missing", "starting", "running", "crashed", "restarting", "done", "halted", "failed"]


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
    measured = next((b for b in reversed(beats) if b.gpu_mem_alloc_gib is not None), beat)
    return RankView(
        rank=rank,
        pid=beat.pid,
        step=beat.step,
        phase=beat.phase,
        age_s=max(0.0, now - beat.ts),
        is_alive=psutil.pid_exists(beat.pid),
        mem_alloc_gib=measured.gpu_mem_alloc_gib,
        mem_reserved_gib=measured.gpu_mem_reserved_gib,
        detail=beat.detail,
    )


def state_of(directory: RunDirectory, ranks: list[RankView]) -> tuple[State, str]:
    """What the run is doing, in a word and in a sentence."""
    if not ranks:
        return "starting", _before_the_first_beat(directory)
    phases = {rank.phase for rank in ranks}
    where = f"step {min(rank.step for rank in ranks)}"
    if "failed" in phases:
        culprit = next(rank for rank in ranks if rank.phase == "failed")
        return "failed", f"rank {culprit.rank} failed at {where}: {culprit.detail or 'train.log says why'}"
    if phases == {"done"}:
        return "done", f"all steps are done, {where}"
    if phases == {"halted"}:
        return "halted", f"halted at {where}, with a checkpoint; launch again to resume"
    if not any(rank.is_alive for rank in ranks):
        if _owner_lives(directory):
            return "restarting", f"no worker is alive after {where}; the launch that is under way starts new ones"
        return "crashed", f"no worker is alive after {where}; launch again to resume"
    return "running", f"{ranks[0].phase} of {where}"


def _before_the_first_beat(directory: RunDirectory) -> str:
    if _owner_lives(directory):
        return "no heartbeat yet: the launch is at its checks, or its workers are starting"
    return f"no heartbeat yet, and nothing is being launched here{_last_preflight(directory)}"


def _last_preflight(directory: RunDirectory) -> str:
    try:
        verdict = json.loads((directory.path / "preflight.json").read_text(encoding="utf-8"))["verdict"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return f"; the last preflight said {verdict}"


def _owner_lives(directory: RunDirectory) -> bool:
    """A supervisor, or a launch that still checks and rehearses."""
    owners = [RunLock(lock).owner() or {} for lock in (directory.lock, directory.launch_lock)]
    return any(isinstance(pid := owner.get("pid"), int) and psutil.pid_exists(pid) for owner in owners)
