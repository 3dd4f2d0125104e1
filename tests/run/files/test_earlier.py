"""Starting again before the end of an earlier run loses neither of the two."""

from pathlib import Path

import pytest

from tamis.config import ConfigError
from tamis.run.files.directory import RunDirectory
from tamis.run.files.earlier import restore_earlier, set_aside_later
from tamis.run.files.lock import RunLock, RunLocked
from tamis.run.files.manifest import damage, latest_valid_checkpoint, retire, write_manifest


def saved(run: RunDirectory, *steps: int) -> None:
    for step in steps:
        run.checkpoint(step).write_bytes(b"state %d" % step)
        write_manifest(run, step, config_hash="0")


def test_later_checkpoints_are_moved_whole_and_the_curves_copied(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    saved(run, 100, 200, 300)
    run.training_csv.write_text("step,loss,lr,toks_per_s\n300,1,1,1\n")
    folder = set_aside_later(run, 100)
    assert folder is not None
    assert run.checkpoints() == [100] and latest_valid_checkpoint(run) == 100
    assert RunDirectory(folder).checkpoints() == [200, 300]
    assert all(damage(RunDirectory(folder).manifest(step)) is None for step in (200, 300))
    assert (folder / "training.csv").read_text() == run.training_csv.read_text()


def test_a_fresh_start_does_not_lose_its_checkpoints_to_retention(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    saved(run, 200, 300)
    set_aside_later(run, 0)
    saved(run, 50)
    assert retire(run, keep=2) == []
    assert latest_valid_checkpoint(run) == 50


def test_an_ordinary_resume_moves_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    saved(run, 100, 200)
    assert set_aside_later(run, 200) is None
    assert run.checkpoints() == [100, 200]


def test_one_command_brings_back_what_was_set_aside_and_loses_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    saved(run, 100, 200, 300)
    run.training_csv.write_text("first")
    folder = set_aside_later(run, 100)
    assert folder is not None
    saved(run, 150, 250)
    run.training_csv.write_text("second")
    with RunLock(run.lock) as lock, pytest.raises(RunLocked):
        lock.acquire("launch")
        restore_earlier(folder)
    assert "up to step 300 back" in restore_earlier(folder)
    assert run.checkpoints() == [100, 150, 200, 300] and latest_valid_checkpoint(run) == 300
    assert run.training_csv.read_text() == "first"
    (aside,) = (path for path in tmp_path.glob("earlier_*") if path != folder)
    assert RunDirectory(aside).checkpoints() == [250] and (aside / "training.csv").read_text() == "second"
    for wrong in (folder, tmp_path, tmp_path / "earlier_nowhere"):
        with pytest.raises(ConfigError, match="holds no checkpoints that were set aside"):
            restore_earlier(wrong)
