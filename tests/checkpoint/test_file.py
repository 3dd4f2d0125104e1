"""Checkpoints that a kill, a bad disk or a full one has damaged: seen, named, and the one before is used."""

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.checkpoint import file as checkpoint
from tamis.checkpoint.file import load_checkpoint, read_checkpoint, save_file
from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.manifest import DamagedCheckpoint, damage, latest_valid_checkpoint
from tamis.train import main, trainer
from tests.train.processes import ranks, run_ranks, tiny_config, train_rank

PARALLEL = ["ddp", "fsdp"]  # one file, or a folder of shards
SMALLER_THAN_A_CHECKPOINT = 20_000  # bytes, yet larger than every other file of the run
CPU = torch.device("cpu")


def config_of(out: Path, parallel: str, *overrides: str) -> Config:
    return tiny_config(out, "train.steps=6", "train.save_every=3", f"runtime.parallel={parallel}", *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDirectory]:
    """A run of two processes with checkpoints at 3 and 6, for each kind."""
    folder, runs = tmp_path_factory.mktemp("trained"), {}
    for parallel in PARALLEL:
        run_ranks(folder / f"logs_{parallel}", 2, train_rank, config_of(folder / parallel, parallel))
        runs[parallel] = RunDirectory(folder / parallel)
    return runs


def copied(run: RunDirectory, target: Path) -> RunDirectory:
    shutil.copytree(run.path, target)
    return RunDirectory(target)


def largest_file(path: Path) -> Path:
    return max(path.iterdir(), key=lambda file: file.stat().st_size) if path.is_dir() else path


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("harm", [truncate, flip_a_bit, lose])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, trained: dict[str, RunDirectory], parallel: str, harm: object
) -> None:
    run = copied(trained[parallel], tmp_path / "run")
    assert latest_valid_checkpoint(run) == 6
    harm(largest_file(run.checkpoint(6)))  # type: ignore[operator]
    complaints: list[str] = []
    assert latest_valid_checkpoint(run, on_damaged=complaints.append) == 3
    assert len(complaints) == 1 and str(run.checkpoint(6)) in complaints[0]
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint_step6\.pt.*resume from checkpoint_step3\.pt"):
        load_checkpoint(run.checkpoint(6), config_of(run.path, parallel), CPU)


def test_auto_resume_skips_a_damaged_checkpoint_and_trains_the_same(
    tmp_path: Path, trained: dict[str, RunDirectory]
) -> None:
    run = copied(trained["ddp"], tmp_path / "run")
    expected = read_checkpoint(run.checkpoint(6), CPU)
    flip_a_bit(run.checkpoint(6))
    said = run_ranks(tmp_path / "logs", 2, train_rank, config_of(run.path, "ddp"), "auto")
    assert "checkpoint_step6.pt is not used: its sha256" in said and "checkpoint_step3.pt" in said
    found = read_checkpoint(run.checkpoint(6), CPU)
    assert all(torch.equal(found["model"][name], weight) for name, weight in expected["model"].items())


def test_an_explicit_damaged_or_missing_checkpoint_is_an_error_never_a_fresh_start(
    tmp_path: Path, trained: dict[str, RunDirectory]
) -> None:
    run = copied(trained["ddp"], tmp_path / "run")
    truncate(run.checkpoint(6))
    for number, wrong in enumerate([run.checkpoint(6), run.checkpoint(5)]):
        with ranks(tmp_path / f"logs{number}", 1, train_rank, config_of(run.path, "ddp"), str(wrong)) as running:
            assert running.wait() == [2]
            assert f"checkpoint {wrong} cannot be used" in running.log(0) and "checkpoint_step3.pt" in running.log(0)


def on_a_full_disk(config: Config, full_from_step: int) -> int:
    """From that step on no file of this process can grow beyond what telemetry needs."""
    save = trainer.save_checkpoint

    def save_with_little_room(run: RunDirectory, state: dict, *rest: Any) -> Path:
        room = SMALLER_THAN_A_CHECKPOINT if state["step"] >= full_from_step else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return save(run, state, *rest)

    trainer.save_checkpoint = save_with_little_room  # type: ignore[assignment]
    return main.train_config(config)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_full_disk_costs_the_new_checkpoint_only_and_training_continues(tmp_path: Path, parallel: str) -> None:
    config = config_of(tmp_path / "run", parallel, "train.keep_checkpoints=1", "train.save_every=2")
    with ranks(tmp_path / "logs", 2, on_a_full_disk, config, 4) as running:
        assert running.wait() == [1, 1], "a run whose end is not saved is not done"
        said = running.log(0)
    run = RunDirectory(config.train.out_dir)
    assert "step 4: NO checkpoint" in said and "step 6: NO checkpoint" in said and "free space under" in said
    assert "step 6/6" in said and "validation loss" in said
    assert latest_valid_checkpoint(run, on_damaged=lambda message: None) == 2, "the old one is not retired for nothing"
    assert not run.checkpoint_leftovers()
    run_ranks(tmp_path / "again", 2, train_rank, config, "auto")
    assert latest_valid_checkpoint(run) == 6


def with_a_folder_in_the_way(config: Config) -> int:
    save = trainer.save_checkpoint

    def save_where_a_folder_is(run: RunDirectory, state: dict, *rest: Any) -> Path:
        run.checkpoint(state["step"]).mkdir(exist_ok=True)
        return save(run, state, *rest)

    trainer.save_checkpoint = save_where_a_folder_is  # type: ignore[assignment]
    return main.train_config(config)


@pytest.mark.parametrize(("limit", "code", "last_step"), [("null", 5, 6), (0, 1, 8)])
def test_saves_that_keep_failing_raise_an_alarm_at_once_and_end_the_run_at_the_limit(
    tmp_path: Path, limit: int | str, code: int, last_step: int
) -> None:
    config = config_of(
        tmp_path / "run", "ddp", "train.save_every=2", "train.steps=8", f"train.max_unsaved_steps={limit}"
    )
    run = RunDirectory(config.train.out_dir)
    with ranks(tmp_path / "logs", 1, with_a_folder_in_the_way, config) as running:
        assert running.wait() == [code], running.output()
        said = running.log(0)
    assert "step 2: NO checkpoint, [Errno 21] Is a directory" in said and f"'{run.checkpoint(2)}'" in said
    assert "move it out of the way" in said and "free space" not in said
    failures = [event for event in read_events(run) if event["event"] == "save_failed"]
    steps = {event["evidence"]["step"] for event in failures}  # the last one is tried twice
    assert steps == set(range(2, last_step + 1, 2))
    beats = read_heartbeats(run.heartbeat(0))
    assert "out of the way" in next(beat.save_error for beat in beats if beat.save_error)
    assert (beats[-1].phase, beats[-1].exit_code, beats[-1].step) == ("failed", code, last_step)
    if code == 5:
        assert run.anomaly.read_text().startswith("cannot_save\n6 steps are not saved, train.max_unsaved_steps is 4")


def test_auto_resume_never_starts_over_when_every_checkpoint_is_damaged(
    tmp_path: Path, trained: dict[str, RunDirectory]
) -> None:
    run = copied(trained["ddp"], tmp_path / "run")
    flip_a_bit(run.checkpoint(3))
    truncate(run.checkpoint(6))
    kept = {
        path.name: path.read_bytes() for path in run.path.iterdir() if path.suffix in (".pt", ".json", ".csv", ".yaml")
    }
    with ranks(tmp_path / "logs", 1, train_rank, config_of(run.path, "ddp"), "auto") as running:
        assert running.wait() == [2], running.output()
        said = running.log(0)
    assert "checkpoint_step3.pt is not used: its sha256" in said and "checkpoint_step6.pt is not used" in said
    assert "Training does not start over by itself" in said and "To start over on purpose, move them away" in said
    assert all((run.path / name).read_bytes() == content for name, content in kept.items())


def killed_while_saving_step_6(config: Config) -> int:
    save = checkpoint.save_file

    def dying(run: RunDirectory, state: dict, config: Config) -> Path:
        if state["step"] == 6:
            checkpoint._Hashing.write = lambda file, data: os.kill(os.getpid(), 9)  # type: ignore
        return save(run, state, config)

    checkpoint.save_file = dying
    return main.train_config(config)


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before_and_the_next_start_clears_up(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "ddp")
    with ranks(tmp_path / "logs", 1, killed_while_saving_step_6, config) as running:
        assert running.wait() == [-9]
    run = RunDirectory(config.train.out_dir)
    assert run.checkpoint_leftovers() and latest_valid_checkpoint(run) == 3
    run_ranks(tmp_path / "again", 1, train_rank, config, "auto")
    assert not run.checkpoint_leftovers() and latest_valid_checkpoint(run) == 6


def test_retention_keeps_the_newest_and_their_manifests(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "train.steps=8", "train.save_every=1", "train.keep_checkpoints=3")
    run_ranks(tmp_path / "logs", 1, train_rank, config)
    run = RunDirectory(config.train.out_dir)
    assert run.checkpoints() == run.checkpoint_traces() == [6, 7, 8]
    assert all(damage(run.manifest(step)) is None for step in (6, 7, 8))


def test_saving_a_step_again_never_leaves_the_old_manifest_with_new_bytes(
    tmp_path: Path, trained: dict[str, RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(trained["ddp"], tmp_path / "run")
    state = read_checkpoint(run.checkpoint(6), CPU)

    def no_manifest(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.checkpoints, "write_manifest", no_manifest)
    with pytest.raises(KeyboardInterrupt):
        save_file(run, state, config_of(run.path, "ddp"))
    assert latest_valid_checkpoint(run, on_damaged=lambda message: None) == 3
