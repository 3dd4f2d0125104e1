"""Checkpoints set aside in OUT/earlier_<time>/, when a run starts before the newest step its directory holds.

They are moved, never deleted. In place, a later resume would take them for the newest, and retention would keep them
instead of the run's own. `tamis restore OUT/earlier_<time>` brings them back.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tamis.config import ConfigError
from tamis.run.files.directory import RunDirectory, new_folder
from tamis.run.files.lock import RunLock, RunLocked


def set_aside_later(run: RunDirectory, step: int) -> Path | None:
    """Move checkpoints later than `step` to OUT/earlier_<time>/, with a copy of the curves; None if there are none."""
    later = [found for found in run.checkpoint_traces() if found > step]
    if not later:
        return None
    folder = new_folder(run.path / f"earlier_{time.strftime('%Y%m%d_%H%M%S')}")
    _move(run, RunDirectory(folder), later)
    for path in (run.training_csv, run.val_csv):
        if path.exists():
            shutil.copy2(path, folder / path.name)
    return folder


def restore_earlier(folder: Path) -> str:
    """Bring the checkpoints and curves of OUT/earlier_<time>/ back to OUT (`tamis restore`); returns a sentence.

    Checkpoints of OUT from the same step on are set aside in turn, so that the restored ones are the newest.
    """
    earlier, run = RunDirectory(folder), RunDirectory(folder.resolve().parent)
    steps = earlier.checkpoints()
    if not folder.name.startswith("earlier_") or not steps:
        raise ConfigError(f"{folder} holds no checkpoints that were set aside: name a folder OUT/earlier_<time>")
    with RunLock(run.launch_lock) as lock:
        lock.acquire("restore", check=lambda: _require_idle(run))
        aside = set_aside_later(run, steps[0] - 1)
        _move(earlier, run, steps)
        for name in (run.training_csv.name, run.val_csv.name):
            if (earlier.path / name).exists():
                shutil.copy2(earlier.path / name, run.path / name)
    moved = f"; those of {run.path.name} from step {steps[0]} on are now in {aside}" if aside else ""
    return f"{run.path} has its checkpoints up to step {steps[-1]} back{moved}. Launch again to resume from there"


def _require_idle(run: RunDirectory) -> None:
    for lock in map(RunLock, (run.lock, run.trainer_lock)):
        if lock.is_held():
            raise RunLocked(lock.refusal())


def _move(source: RunDirectory, target: RunDirectory, steps: list[int]) -> None:
    """Move checkpoints; each manifest first, so that a kill in between leaves them unfinished, not damaged."""
    for step in steps:
        for path in (source.manifest(step), source.checkpoint(step)):
            if path.exists():
                path.rename(target.path / path.name)
