"""Launches and halts from the command line: phases, locks, refused starts, detached runs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tamis.cli.main import train_showcase
from tamis.config import Config, ConfigError, load_config
from tamis.run import launch as launching
from tamis.run.files.directory import RunDirectory
from tamis.run.files.halt import HaltFile, halt_run
from tamis.run.files.lock import RunLock, RunLocked
from tamis.run.launch import Job, halts_forwarded, launch_phases
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.plan import SHOWCASE_CONFIG
from tests.cli.typed import command_line, tamis, typed
from tests.run.fabricate import GPUS


def test_without_a_config_launch_takes_what_the_main_job_would(here: Path, monkeypatch, capsys) -> None:
    (here / "configs").mkdir()
    (here / "mine.yaml").rename(here / SHOWCASE_CONFIG)
    monkeypatch.setattr(launching, "read_gpus", list)
    monkeypatch.setattr("tamis.cli.common.read_gpus", list)
    launched: list[Job] = []
    monkeypatch.setattr(launching, "launch_once", lambda job: launched.append(job) or 0)
    assert typed("launch", "train.steps=2") == 0
    (job,) = launched
    assert (job.config_path, job.config.train.steps, job.config.model.dim) == (SHOWCASE_CONFIG, 2, 32)
    told = capsys.readouterr()
    assert f"no config was named, so this is {SHOWCASE_CONFIG}" in told.err
    assert f"config: {SHOWCASE_CONFIG}" in told.out


def test_two_config_files_are_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="one config file at most"):
        tamis("check", "mine.yaml", "other.yaml")


def test_halt_reports_that_there_is_nothing_to_halt(here: Path, capsys) -> None:
    RunDirectory("out").create().config_yaml.touch()
    assert halt_run(RunDirectory("out"), "why", 1) == 1
    assert "nothing runs in out" in capsys.readouterr().out
    assert not (here / "out" / ".HALT").exists()


def test_halt_waits_until_the_run_has_stopped(here: Path, capsys) -> None:
    run = RunDirectory(here / "out").create()
    lock = RunLock(run.lock)
    lock.acquire("launch")

    def stop_when_asked() -> None:
        until(HaltFile(run.halt).requested)
        HaltFile(run.halt).consume()
        lock.release()

    thread = threading.Thread(target=stop_when_asked)
    thread.start()
    assert halt_run(run, "moving house", 60) == 0
    thread.join()
    assert "asked" in (told := capsys.readouterr().out)
    assert "stopped" in told


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


def test_a_halt_in_out_stops_the_phase_that_runs_elsewhere(tmp_path: Path) -> None:
    out, phase = RunDirectory(tmp_path).create(), RunDirectory(tmp_path / "phases" / "phase1").create()
    with halts_forwarded(out, phase, time.time() - 1):
        HaltFile(out.halt).request("enough for today")
        until(HaltFile(phase.halt).requested)
    assert HaltFile(phase.halt).reason() == "enough for today"
    assert not out.halt.exists()


def test_a_halt_that_cannot_be_forwarded_yet_is_not_lost(tmp_path: Path) -> None:
    out, phase = RunDirectory(tmp_path / "out").create(), RunDirectory(tmp_path / "phase1")
    HaltFile(out.halt).request("enough for today")
    with halts_forwarded(out, phase, time.time() - 60):
        time.sleep(2 * launching.LOOK_FOR_HALT_EVERY_S)
        assert out.halt.exists()
        phase.create()
        until(lambda: not out.halt.exists())
    assert HaltFile(phase.halt).reason() == "enough for today"


def test_a_halt_from_before_the_launch_stops_nothing(tmp_path: Path) -> None:
    out, phase = RunDirectory(tmp_path).create(), RunDirectory(tmp_path / "phases" / "phase1").create()
    HaltFile(out.halt).request("long ago")
    os.utime(out.halt, (1, 1))
    with halts_forwarded(out, phase, time.time()):
        time.sleep(2 * launching.LOOK_FOR_HALT_EVERY_S)
    assert not phase.halt.exists()


@pytest.fixture
def job(here: Path) -> Job:
    config = load_config("mine.yaml")
    return Job(config, "mine.yaml", processes=1, gpus=[], restarts=0, started=time.time())


def test_a_halt_between_two_phases_ends_the_launch(job: Job, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launching, "run_preflight", lambda *words, **options: 0)
    HaltFile(RunDirectory("out").create().halt).request("between")
    assert launch_phases(job, {0: 1, 1: 1, 2: 1, 3: 1}) == 3
    assert "halted between two phases: between" in capsys.readouterr().out


def test_a_launch_by_phases_owns_its_directory_from_the_preflight_on(job: Job, monkeypatch) -> None:
    def second_launch(*words: object, **options: object) -> int:
        with pytest.raises(RunLocked, match="out belongs to a running launch by phases"):
            launching.directory_for(job.config)
        return 1

    monkeypatch.setattr(launching, "run_preflight", second_launch)
    assert launch_phases(job) == 1
    assert not RunLock(RunDirectory("out").launch_lock).is_held()


def test_a_smoke_test_owns_the_directory_of_its_run_and_a_halt_there_stops_it(here: Path, monkeypatch, capsys) -> None:
    out = RunDirectory("out")

    def launched(config: Config, **options: object) -> int:
        with pytest.raises(RunLocked, match="out belongs to a running smoke test"):
            launching.directory_for(load_config("mine.yaml"))
        HaltFile(out.halt).request("moving house")
        until(HaltFile(RunDirectory(config.train.out_dir).halt).requested)
        return 3

    monkeypatch.setattr("tamis.run.launch.supervise", launched)
    monkeypatch.setattr("tamis.run.launch.read_gpus", lambda: [GPUS[0]])
    monkeypatch.setattr("tamis.run.launch.SHOWCASE_CONFIG", "mine.yaml")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the launch adds variables for NCCL
    assert typed("run", "mine.yaml") == 3
    assert "the smoke test was halted: nothing was launched" in capsys.readouterr().out
    assert not out.halt.exists() and not RunLock(out.launch_lock).is_held()
    assert read_snapshot(out.path, gpus=[]).state == "halted"


def test_a_launch_of_two_processes_is_supervised_and_leaves_the_documented_files(here: Path) -> None:
    done = command_line("launch", "mine.yaml", "--processes", "2", "train.tensorboard=false")
    assert done.returncode == 0, done.stdout
    run = RunDirectory(here / "out")
    assert "train.tensorboard: True → False" in run.run_info.read_text()
    assert "step 3/3" in run.train_log.read_text()
    start, end = (json.loads(line) for line in run.events.read_text().splitlines())
    assert (start["event"], start["reason"], end["event"]) == ("start", "2 workers from the beginning", "end")
    assert run.heartbeat(1).exists()


@pytest.mark.parametrize(
    "words", [("run",), ("run", "--detach"), ("launch",), ("launch", "--phases", "--detach")], ids=" ".join
)
@pytest.mark.parametrize("held", ["lock", "launch_lock"])
def test_a_start_that_is_refused_leaves_nothing_behind(words: tuple[str, ...], held: str, here: Path, capsys) -> None:
    run = RunDirectory(here / "out").create()
    with RunLock(getattr(run, held)) as lock:
        lock.acquire("launch")
        before = sorted(here.rglob("*"))
        assert typed(*words, "mine.yaml") == 2
        assert "out belongs to a running launch" in capsys.readouterr().err
        assert sorted(here.rglob("*")) == before
    (here / "file").touch()
    before = sorted(here.rglob("*"))
    assert typed(*words, "mine.yaml", "train.out_dir=file") == 2
    assert capsys.readouterr().err.endswith(
        "file cannot be a run's directory (it is a file): choose another train.out_dir\n"
    )
    assert sorted(here.rglob("*")) == before


def test_a_start_that_fails_for_want_of_data_leaves_the_reason(here: Path) -> None:
    lost = ["data.dataset=fineweb_edu_local", "data.local_path=nowhere"]
    assert command_line("run", "mine.yaml", *lost).returncode == 6
    reason = "the data failed: data.local_path nowhere does not exist"
    (log,) = here.glob("artifacts/train_runs/*/train.log")
    assert reason in log.read_text()
    assert f"FAILED  rank 0 failed at step 0: {reason}" in tamis("monitor", "out", "--once").output


def test_the_estimate_for_the_phases_is_measured_or_missing(job: Job, monkeypatch, capsys) -> None:
    assert (launching.estimated_toks_per_s(job) or 0) > 0
    monkeypatch.setattr(launching.sys, "executable", "false")
    assert launching.estimated_toks_per_s(job) is None
    assert "the estimate failed" in capsys.readouterr().out


def test_a_saved_copy_of_the_last_checkpoint_resumes(here: Path, capsys) -> None:
    assert train_showcase(["--config", "mine.yaml", "--save", "kept/last.pt"]) == 0
    told = capsys.readouterr().out
    assert "copied out/checkpoint_step3.pt to kept/last.pt" in told
    assert "config mine.yaml, data.dataset sample (for random tokens: --dataset synthetic)" in told
    assert train_showcase(["--config", "mine.yaml", "--steps", "4", "--resume", "kept/last.pt"]) == 0
    told = capsys.readouterr().out
    assert "resuming from kept/last.pt" in told
    assert "step 4/4" in told
    assert train_showcase(["--config", "mine.yaml", "--steps", "4", "--resume", "out/checkpoint_step9.pt"]) == 2
    assert "there is no such file; resume from checkpoint_step4.pt" in capsys.readouterr().err
    (here / "kept" / "last.pt").write_bytes((here / "kept" / "last.pt").read_bytes()[:-1])
    assert train_showcase(["--config", "mine.yaml", "--steps", "4", "--resume", "kept/last.pt"]) == 2
    assert "kept/last.pt cannot be used: it holds" in capsys.readouterr().err


def test_a_failed_preflight_launches_nothing(job: Job, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launching, "run_preflight", lambda *words, **options: 1)
    assert launch_phases(job) == 1
    assert "not launched: the preflight failed" in capsys.readouterr().out
    assert not list(Path("out").glob("phases/*"))


def test_step_counts_that_make_no_sense_are_refused_before_anything_runs(here: Path) -> None:
    with pytest.raises(ConfigError, match="--phase-steps must be 4 counts"):
        tamis("launch", "mine.yaml", "--phases", "--phase-steps", "1,2")


@pytest.mark.parametrize("words", [("--phase-steps", "1,2,3,4"), ("--repeat",)], ids=" ".join)
def test_what_is_about_phases_is_not_ignored_without_them(words: tuple[str, ...], here: Path) -> None:
    with pytest.raises(ConfigError, match="give --phases too"):
        tamis("launch", "mine.yaml", *words)


def test_a_detached_rehearsal_is_refused_where_its_run_would_be_shorter_than_the_one_there(here: Path, capsys) -> None:
    run = RunDirectory(here / "out").create()
    for path in (run.checkpoint(3), run.manifest(3)):
        path.touch()
    before = sorted(here.rglob("*"))
    assert typed("launch", "mine.yaml", "--phases", "--phase-steps", "1,1,1,2", "--detach") == 2
    assert "out is at step 3, beyond train.steps=2" in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_a_launch_by_phases_continues_without_its_terminal(here: Path) -> None:
    told = command_line("launch", "mine.yaml", "runtime.device=cuda", "--phases", "--detach")
    has_ended = "it has ended with exit code 1" in told.stdout  # the preflight may fail at once
    assert told.returncode == int(has_ended)
    assert "launched in the background" in told.stdout
    log = here / "out" / "launch.log"
    until(lambda: "not launched: the preflight failed" in log.read_text())
    assert "no GPU found, but runtime.device is cuda" in log.read_text()
