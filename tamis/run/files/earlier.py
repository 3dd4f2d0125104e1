"""Checkpoints set aside in OUT/earlier_<time>/, when a run starts before the newest step its directory holds.

They are moved, never deleted. In place, a later resume would take them for the newest, and retention would keep them
instead of the run's own.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tamis.run.files.directory import RunDirectory


def set_aside_later(run: RunDirectory, step: int) -> Path | None:
    """Move checkpoints later than `step` to OUT/earlier_<time>/, with a copy of the curves; None if there are none."""
    later = [found for found in run.checkpoint_traces() if found > step]
    if not later:
        return None
    folder = run.path / f"earlier_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir(exist_ok=True)
    for found in later:  # the manifest goes first: what is cut short here is unfinished, not damaged
        for path in (run.manifest(found), run.checkpoint(found)):
            if path.exists():
                path.rename(folder / path.name)
    for path in (run.training_csv, run.val_csv):
        if path.exists():
            shutil.copy2(path, folder / path.name)
    return folder
