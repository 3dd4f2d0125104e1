"""The names of a run's files."""

from pathlib import Path

from tamis.run.files.directory import RunDirectory, new_folder


def test_nothing_is_created_by_naming_files(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "out")
    names = [run.training_csv, run.val_csv, run.heartbeat(3), run.checkpoint(10), run.halt, run.anomaly, run.events]
    assert [path.name for path in names] == [
        "training.csv",
        "val.csv",
        "heartbeat_rank3.jsonl",
        "checkpoint_step10.pt",
        ".HALT",
        ".anomaly_type",
        "events.jsonl",
    ]
    assert not run.path.exists()
    assert run.checkpoints() == [] and run.heartbeats() == {}


def test_checkpoints_are_listed_by_step_and_only_when_finished(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (9, 10, 100):
        run.checkpoint(step).touch()
    for step in (9, 100, 200):
        run.manifest(step).touch()
    (tmp_path / "checkpoint_step11.pt.123.tmp").touch()
    (tmp_path / "checkpoint_stepX.pt").touch()
    assert run.checkpoints() == [9, 100]
    assert run.checkpoint_traces() == [9, 10, 100, 200]
    assert [path.name for path in run.checkpoint_leftovers()] == ["checkpoint_step11.pt.123.tmp"]


def test_heartbeats_are_found_by_rank_in_numeric_order(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for rank in (10, 2, 0):
        run.heartbeat(rank).touch()
    (tmp_path / "heartbeat_rank0.jsonl.1").touch()
    assert list(run.heartbeats()) == [0, 2, 10]


def test_two_folders_of_the_same_second_get_different_names(tmp_path: Path) -> None:
    folders = [new_folder(tmp_path / "logs" / "m7c_20261116_021500") for _ in range(3)]
    assert [folder.name[19:] for folder in folders] == ["", "_2", "_3"]
    assert all(folder.is_dir() for folder in folders)
