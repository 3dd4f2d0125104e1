"""A start that is refused leaves no trace, and a resume with other hyperparameters is recorded."""

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest

from tamis.config import Config, build_config
from tamis.run import launch
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, read_events
from tamis.run.files.identity import OtherRun
from tamis.run.files.info import read_info
from tamis.run.files.lock import RunLock, RunLocked
from tamis.run.files.manifest import DamagedCheckpoint
from tamis.run.supervise.checkpoint_check import FirstCheckpointCheck
from tamis.run.supervise.supervisor import LaunchOptions, supervise
from tests.faults.launched import fake_command, tiny_config
from tests.run.directory_bytes import directory_bytes

QUICK = LaunchOptions(command=fake_command, look_every_s=0.05)


def changed(config: Config, **sections: dict[str, object]) -> Config:
    tree = config.model_dump()
    return build_config({name: keys | sections.get(name, {}) for name, keys in tree.items()})


def job(config: Config) -> launch.Job:
    return launch.Job(config, "mine.yaml", processes=1, gpus=[], restarts=0, started=time.time())


@pytest.fixture(autouse=True)
def fake_trainer(monkeypatch, tmp_path):
    """Launches start the trainer without a model, and their logs go to the test's folder."""
    monkeypatch.setattr(launch, "supervise", lambda config, **_: supervise(config, options=QUICK))
    monkeypatch.setattr(launch, "LAUNCH_LOGS", tmp_path / "train_runs")


@pytest.fixture
def finished(tmp_path: Path) -> Config:
    """The configuration of a run of ten steps that is done."""
    config = tiny_config(tmp_path / "out", steps=10)
    assert launch.launch_once(job(config)) == 0
    return config


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"dim": 64}, "data": {"dataset": "synthetic"}},
        {"data": {"tokenizer": "gpt2"}},
        {"train": {"seed": 7}},
        {"train": {"steps": 9}},
    ],
    ids=str,
)
def test_another_run_or_fewer_steps_are_refused_before_a_byte_changes(finished: Config, other) -> None:
    out = Path(finished.train.out_dir)
    before = directory_bytes(out)
    for start in (launch.launch_once, launch.launch_phases):
        with pytest.raises(OtherRun, match=r"another train\.out_dir\. Nothing|Nothing was changed"):
            start(job(changed(finished, **other)))
    with pytest.raises(OtherRun):
        launch.launch_detached(changed(finished, **other), ["run"])
    assert directory_bytes(out) == before


def test_a_rehearsal_shorter_than_the_run_in_out_is_refused_before_a_byte_changes(finished: Config) -> None:
    out, steps = Path(finished.train.out_dir), {0: 1, 1: 2, 2: 3, 3: 6}
    before = directory_bytes(out)
    with pytest.raises(OtherRun, match=r"is at step 10, beyond train.steps=6: .*the last number of --phase-steps"):
        launch.launch_phases(job(finished), steps)
    assert directory_bytes(out) == before


def test_a_finished_run_keeps_its_records_whatever_hyperparameters_are_given(finished: Config, capsys) -> None:
    out = Path(finished.train.out_dir)
    before = directory_bytes(out)
    assert launch.launch_once(job(changed(finished, train={"lr": 1.0}))) == 0
    assert "nothing left to do; raise train.steps" in capsys.readouterr().out
    assert directory_bytes(out) == before


def test_a_finished_run_that_holds_nothing_out_starts_no_worker(finished: Config, capsys) -> None:
    run = RunDirectory(finished.train.out_dir)
    run.val_csv.unlink()
    before = directory_bytes(run.path)
    assert launch.launch_once(job(finished)) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert directory_bytes(run.path) == before
    run.metrics_json.unlink()  # as if killed after the last save: the evaluation is still to do
    assert launch.launch_once(job(finished)) == 0
    assert run.val_csv.exists()


def test_a_resume_with_other_hyperparameters_is_recorded_at_its_step(finished: Config) -> None:
    run = RunDirectory(finished.train.out_dir)
    assert launch.launch_once(job(changed(finished, train={"lr": 1e-3, "steps": 12}))) == 0
    (event,) = [event for event in read_events(run) if event["event"] == "config_changed"]
    assert "from step 10 on" in event["reason"] and "train.lr: 0.0002 → 0.001" in event["reason"]
    assert (event["evidence"]["step"], event["evidence"]["changes"]["train.steps"]) == (10, [10, 12])
    assert "lr: 0.001" in run.config_yaml.read_text()


def test_a_trainer_that_no_supervisor_started_is_not_disturbed(finished: Config) -> None:
    run = RunDirectory(finished.train.out_dir)
    with RunLock(run.trainer_lock) as trainer:
        trainer.acquire("trainer")
        before = directory_bytes(run.path)
        with pytest.raises(RunLocked, match="belongs to a running trainer"):
            launch.launch_once(job(changed(finished, train={"steps": 20})))
        assert directory_bytes(run.path) == before


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over_by_itself(finished: Config) -> None:
    run = RunDirectory(finished.train.out_dir)
    for step in run.checkpoints():
        run.checkpoint(step).write_bytes(b"damaged")
    before = directory_bytes(run.path)
    with pytest.raises(DamagedCheckpoint) as refused:
        supervise(changed(finished, train={"steps": 20}), options=QUICK)
    assert all(run.checkpoint(step).name in str(refused.value) for step in run.checkpoints())
    assert "To start over on purpose, move them away (mkdir" in str(refused.value)
    assert directory_bytes(run.path) == before


def test_scratch_files_of_killed_processes_are_removed_by_the_next_launch(finished: Config) -> None:
    run, dead = RunDirectory(finished.train.out_dir), 2**22 - 3
    left = [f"run.info.{dead}.tmp", f"checkpoint_step5.json.{dead}.tmp", f".stacks_rank0_pid{dead}.raw"]
    kept = [f"metrics.json.{os.getpid()}.tmp", "mine.tmp"]  # of a living process, and of a person
    for name in left + kept:
        (run.path / name).touch()
    assert launch.launch_once(job(changed(finished, train={"steps": 12}))) == 0
    names = os.listdir(run.path)
    assert not set(left) & set(names) and set(kept) <= set(names)


@pytest.mark.parametrize("loads", [True, False])
def test_the_first_checkpoint_of_a_production_run_is_loaded_once(tmp_path: Path, monkeypatch, loads: bool) -> None:
    config = tiny_config(tmp_path / "out", steps=20)
    run, events = RunDirectory(config.train.out_dir).create(), []
    log = EventLog(run, by="supervisor", say=events.append)
    child = ["true"] if loads else ["sh", "-c", "echo error: the file is cut; exit 2"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(child, **options))
    for check in (
        FirstCheckpointCheck(run, config, log),  # not production
        FirstCheckpointCheck(run, changed(config, runtime={"production": True}), log),
    ):
        check.poll()
        run.checkpoint(5).write_bytes(b"5")
        run.manifest(5).write_text("{}")
        until = time.monotonic() + 20
        while not check._is_done and time.monotonic() < until:
            check.poll()
            time.sleep(0.01)
        check.close()
        run.manifest(5).unlink()
    word = "checkpoint_loads" if loads else "checkpoint_unloadable: checkpoint_step5.pt does not load: error: the file"
    assert len(events) == 1 and word in events[0]


def race(out: Path, lr: float, gate, ended) -> None:
    config = build_config({"train": {"out_dir": str(out), "lr": lr}})
    gate.wait()
    try:
        with launch.claimed(config, "launch") as (directory, _):
            launch._write_run_info(job(config), directory.path, directory)
            ended.wait()
    except RunLocked:
        ended.wait()
        os._exit(2)
    os._exit(0)


@pytest.mark.parametrize("round_", range(5))
def test_of_two_launches_at_once_the_refused_one_writes_nothing(tmp_path: Path, round_: int) -> None:
    context = multiprocessing.get_context("fork")
    gate, ended = context.Barrier(2), context.Barrier(2)
    rates = (1e-3, 2e-3)
    both = [context.Process(target=race, args=(tmp_path / "out", lr, gate, ended)) for lr in rates]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    codes = [process.exitcode for process in both]
    assert sorted(codes) == [0, 2]
    winner = build_config({"train": {"out_dir": str(tmp_path / "out"), "lr": rates[codes.index(0)]}})
    assert read_info(tmp_path / "out" / "run.info")["config_hash"] == winner.hash
