"""Loggers of the curves: each real package writes offline under OUT, a resume continues, and none can end a run."""

from __future__ import annotations

import builtins
import importlib.util
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tamis.config import Config, ConfigError, load_config
from tamis.run.files.directory import RunDirectory
from tamis.train.console import Console
from tamis.train.loggers import TRACKERS, open_loggers
from tests.train.test_telemetry import report, telemetry

VALUES = {"train/loss": 2.5}


def config_for(tracker: str) -> Config:
    return load_config(None, [f"log.to=[{tracker}]", "log.offline=true", "log.project=curves"])


def write_twice(tracker: str, folder: Path) -> RunDirectory:
    """Open a logger, write, close, and do so again as a resume does."""
    run = RunDirectory(folder / "run").create()
    for step in (1, 2):
        (logger,) = open_loggers(config_for(tracker), run, Console(rank=1))
        logger.log(VALUES, step)
        logger.close()
    return run


def test_wandb_offline_keeps_the_points_of_one_run_in_its_own_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    run = write_twice("wandb", tmp_path)
    name = (run.path / "wandb_run").read_text()
    folders = [path.name for path in (run.path / "wandb").glob("offline-run-*")]
    assert folders and all(folder.endswith(name) for folder in folders)
    assert all(list(path.glob("*.wandb")) for path in (run.path / "wandb").glob("offline-run-*"))


def test_mlflow_offline_keeps_the_points_of_one_run_in_its_own_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    run = write_twice("mlflow", tmp_path)
    client = mlflow.MlflowClient(str((run.path / "mlruns").resolve()))
    name = (run.path / "mlflow_run").read_text()
    assert [point.step for point in client.get_metric_history(name, "train/loss")] == [1, 2]
    assert client.get_run(name).data.params["train.seq_len"] == "2048"


def test_trackio_offline_keeps_the_points_of_one_run_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("trackio") is None:  # its folder is read at the first import
        pytest.skip("pip install trackio")
    monkeypatch.setenv("TRACKIO_DIR", "")  # restored afterwards
    run = write_twice("trackio", tmp_path)
    (file,) = (run.path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        assert [row[0] for row in database.execute("select step from metrics order by step")] == [1, 2]


def test_a_tracker_that_cannot_be_opened_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, console = RunDirectory(tmp_path).create(), Console(rank=1)

    def without_packages(name: str, *rest: Any) -> Any:
        if name in TRACKERS:
            raise ModuleNotFoundError(f"No module named '{name}'")
        return imported(name, *rest)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_packages)
    with pytest.raises(ConfigError, match=r"log\.to names mlflow, and No module .*: pip install mlflow-skinny"):
        open_loggers(config_for("mlflow"), run, console)
    monkeypatch.undo()

    def without_key(config: Config, run: RunDirectory) -> Any:
        raise RuntimeError("no API key")

    monkeypatch.setitem(TRACKERS, "wandb", without_key)
    with pytest.raises(ConfigError, match=r"log\.to names wandb, .*\(no API key\): log in to it, set log\.offline"):
        open_loggers(config_for("wandb"), run, console)


def test_a_logger_that_fails_later_is_turned_off_and_the_run_goes_on(tmp_path: Path) -> None:
    class Failing:
        name = "failing"
        calls = 0

        def log(self, values: dict[str, float], step: int) -> None:
            self.calls += 1
            raise ConnectionError("no network")

        def close(self) -> None:
            raise AssertionError("it was turned off")

    opened, failing = telemetry(tmp_path, "log.to=[]"), Failing()
    opened.loggers.append(failing)
    for step in (5, 10):
        opened.finished(report(step))
    opened.close()
    assert failing.calls == 1
    assert (tmp_path / "training.csv").read_text().count("\n") == 3
