"""A run directory that is moved away, and output that cannot be written."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.files.records import SampleLog
from tests.train.processes import ranks, tiny_config, train_rank, wait_until


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_trainer_whose_directory_is_moved_or_deleted_ends_and_leaves_the_new_one_alone(
    tmp_path: Path, is_deleted: bool
) -> None:
    run, moved = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run.old")
    config = tiny_config(run.path, "train.steps=100000", "train.save_every=5", "train.keep_checkpoints=1")
    with ranks(tmp_path / "logs", 1, train_rank, config) as running:
        wait_until(lambda: bool(run.checkpoints()), "a checkpoint is there")
        run.path.rename(moved.path)
        run.create()
        run.checkpoint(1).write_bytes(b"of the new run")
        run.manifest(1).write_text("{}")
        if is_deleted:
            shutil.rmtree(moved.path, ignore_errors=True)
        assert running.wait() == [2], running.output()
        said = running.log(0)
    assert f"error: {run.path} was moved or deleted while this run used it" in said and "Traceback" not in said
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoint_step1.json", "checkpoint_step1.pt"]
    if not is_deleted:
        assert latest_valid_checkpoint(moved, on_damaged=lambda problem: None)
        assert read_heartbeats(moved.heartbeat(0))[-1].exit_code == 2


def with_output(kind: str, config: Config) -> int:
    """Train with a stdout and stderr on a full disk, on a closed pipe, or in a locale without UTF-8."""
    if kind == "full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    if kind == "ascii":
        sys.stdout.reconfigure(encoding="ascii")  # type: ignore[union-attr]
    else:
        os.dup2(output, 1)
        os.dup2(output, 2)
    return train_rank(config)


@pytest.mark.parametrize("kind", ["full disk", "closed pipe", "ascii"])
def test_output_that_cannot_be_written_does_not_end_training(tmp_path: Path, kind: str) -> None:
    config = tiny_config(tmp_path / "run", "train.steps=3", "train.save_every=2", "train.samples=1")
    with ranks(tmp_path / "logs", 1, with_output, kind, config) as running:
        running.wait()
    [sample] = SampleLog(RunDirectory(config.train.out_dir).samples).read()
    assert sample.step == 3 and sample.prompt.isascii() and sample.text
    assert latest_valid_checkpoint(RunDirectory(config.train.out_dir)) == 3
    assert read_heartbeats(RunDirectory(config.train.out_dir).heartbeat(0))[-1].exit_code == 0
