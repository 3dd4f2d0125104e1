"""`tamis halt RUN`: writes .HALT and waits until the run has taken it, so that the operator knows."""

from __future__ import annotations

import time
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.halt import HaltFile
from tamis.run.files.lock import RunLock
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.find import existing_run


def halt_run(run_dir: str | Path, reason: str, wait_s: float) -> int:
    """0 when the run has stopped (or nothing was asked to be waited for), 1 when nothing runs or it goes on."""
    run = existing_run(run_dir)
    if not _is_running(run):
        print(f"nothing runs in {run.path}: there is nothing to halt")
        return 1
    HaltFile(run.halt).request(reason)
    print(f"asked {run.path} to halt at the next step boundary: {reason}", flush=True)
    if wait_s == 0:
        return 0
    deadline = time.monotonic() + wait_s
    while _is_running(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    return _told(run, wait_s)


def _told(run: RunDirectory, wait_s: float) -> int:
    if _is_running(run):
        print(f"still running after {wait_s:g} s: {run.halt} stays, tamis monitor {run.path} shows what it does")
        return 1
    step = latest_valid_checkpoint(run)
    print(
        "stopped; there is no checkpoint yet" if step is None else f"stopped; newest checkpoint {run.checkpoint(step)}"
    )
    return 0


def _is_running(run: RunDirectory) -> bool:
    """A launch that rehearses, a supervisor or a trainer holds the directory."""
    return any(RunLock(lock).is_held() for lock in (run.launch_lock, run.lock, run.trainer_lock))
