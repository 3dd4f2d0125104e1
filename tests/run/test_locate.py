"""Finding the run that an operator means, and the error when there is none."""

from pathlib import Path

import pytest

from tamis.config import load_config
from tamis.data.prepare import prepare
from tamis.run.files.directory import RunDirectory
from tamis.run.files.info import write_info
from tamis.run.locate import (
    RUNS,
    NoSuchRun,
    existing_model,
    existing_run,
    no_run_in,
    require_folder,
    runs_in,
    runs_near,
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, and the folder of a launch's logs, as `tamis run` leaves them."""
    monkeypatch.chdir(tmp_path)
    for name in ("m7c_125m", "train_showcase"):
        RunDirectory(Path("artifacts") / name).create().config_yaml.touch()
    logs = Path("artifacts/train_runs/m7c_20260101_000000")
    logs.mkdir(parents=True)
    write_info(logs / "run.info", {"run_dir": str(logs), "out_dir": "artifacts/train_showcase"})
    return tmp_path


def refusal(path: str) -> str:
    with pytest.raises(NoSuchRun) as error:
        existing_run(path)
    return str(error.value)


def test_a_run_is_found_by_any_trace_it_left(tmp_path: Path) -> None:
    for trace in ("config.yaml", "launch.log", "preflight.json", "heartbeat_rank3.jsonl"):
        run = RunDirectory(tmp_path / trace.partition(".")[0]).create()
        (run.path / trace).touch()
        assert existing_run(run.path).path == run.path


def test_the_folder_to_list_must_exist_unless_it_is_the_one_of_the_first_run(runs: Path) -> None:
    require_folder(Path("artifacts"))
    require_folder(runs)
    for path, state in (("nope", "does not exist"), ("artifacts/m7c_125m/config.yaml", "is not a directory")):
        with pytest.raises(NoSuchRun, match=f"{path} {state}; give a folder with runs in it .runs here: .*m7c_125m"):
            require_folder(Path(path))


def test_a_bare_machine_has_no_runs_to_list_and_that_is_no_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_folder(RUNS)


def test_a_folder_of_token_shards_is_no_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Fellow citizens, " * 500)
    keys = ["data.dataset=local", f"data.local_path={text}", "data.tokenizer=byte"]
    prepare(load_config(None, keys), tmp_path / "shards", workers=1)
    assert (tmp_path / "shards" / ".lock").exists()
    assert runs_in(tmp_path) == []
    with pytest.raises(NoSuchRun, match="shards holds no run"):
        existing_run(tmp_path / "shards")


def test_the_most_similar_name_comes_first(runs: Path) -> None:
    assert runs_near(Path("artifacts/showcase"))[0] == Path("artifacts/train_showcase")
    assert runs_near(Path("m7c"))[0] == Path("artifacts/m7c_125m")


@pytest.mark.parametrize(
    ("path", "state"),
    [
        ("artifacts/m7c", "does not exist"),
        ("artifacts", "holds no run"),
        ("artifacts/m7c_125m/config.yaml", "is not a directory"),
    ],
)
def test_a_path_that_is_not_a_run_is_refused_with_the_runs_that_exist(path: str, state: str, runs: Path) -> None:
    message = refusal(path)
    assert message.startswith(f"{path} {state}; give the directory that train.out_dir names (runs here: ")
    assert "artifacts/m7c_125m" in message
    assert "train_runs" not in message


def test_the_folder_of_a_launchs_logs_leads_to_its_run(runs: Path) -> None:
    logs = "artifacts/train_runs/m7c_20260101_000000"
    assert refusal(logs) == f"{logs} holds the logs of a launch; its run is in artifacts/train_showcase"


def test_where_nothing_ever_ran_the_first_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert no_run_in("artifacts/x").endswith("(there is no run here yet, tamis run starts one)")


def test_a_model_that_is_not_there_is_answered_with_the_checkpoints_or_runs_nearby(runs: Path) -> None:
    run = RunDirectory("artifacts/m7c_125m")
    assert existing_model(run.path) == run.path
    for step in (50, 100):
        run.checkpoint(step).touch()
        run.manifest(step).touch()
    with pytest.raises(
        NoSuchRun, match=r"step7.pt does not exist; artifacts/m7c_125m has checkpoints of steps 50, 100"
    ):
        existing_model(run.checkpoint(7))
    with pytest.raises(NoSuchRun, match=r"config.yaml is no checkpoint; artifacts/m7c_125m has checkpoints of steps"):
        existing_model(run.config_yaml)
    with pytest.raises(NoSuchRun, match=r"give a checkpoint, a run's directory, .* \(runs here: artifacts/m7c_125m"):
        existing_model(Path("m7c_125m"))
