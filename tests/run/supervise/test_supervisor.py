"""The supervisor's parts without faults: its command lines, its screen, its events, and what it imports."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog, read_events, write_anomaly
from tamis.run.files.lock import ProcessId, RunLock, RunLocked
from tamis.run.supervise.supervisor import LaunchOptions, supervise
from tamis.run.supervise.worker_processes import Screen, WorkerProcesses, trainer_command
from tests.faults.launched import tiny_config


def test_one_process_is_started_by_python_and_several_by_torchrun() -> None:
    one = trainer_command(Path("out/config.yaml"), 1, None)
    assert (
        one[-4:] == ["-m", "tamis.train.main", "--config", "out/config.yaml"]
        and "tamis.train.tools.torchrun" not in one
    )
    eight = trainer_command(Path("out/config.yaml"), 8, Path("out/checkpoint_step5.pt"))
    assert eight[eight.index("--nproc_per_node") + 1] == "8"
    assert eight[-2:] == ["--resume", "out/checkpoint_step5.pt"]
    assert all(any("train_showcase.py" in word for word in command) for command in (one, eight))


def test_the_name_operators_look_for_does_not_disturb_python() -> None:
    command = trainer_command(Path("x"), 1, None)
    python = command[: command.index("-m")]
    assert subprocess.run([*python, "-c", "print('runs')"], capture_output=True, text=True).stdout == "runs\n"


def test_supervision_never_imports_torch() -> None:
    code = "import sys, tamis.run.supervise.supervisor, tamis.run.worker.sidecar; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_workers_are_streamed_to_the_log_and_their_exit_code_is_true(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    workers = WorkerProcesses([sys.executable, "-c", script], tmp_path / "log", (Screen(1), Screen(2)))
    workers.close()
    assert workers.process.returncode == 7
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]
    assert capfd.readouterr() == ("out\n", "err\n")


@pytest.mark.parametrize("in_the_way", [Path.mkdir, os.mkfifo])
def test_workers_end_even_if_their_log_cannot_be_written(tmp_path: Path, in_the_way) -> None:
    in_the_way(tmp_path / "log")
    script = "import sys; sys.stdout.write('x' * (3 << 20)); sys.exit(7)"  # more than the pipe holds
    workers = WorkerProcesses([sys.executable, "-c", script], tmp_path / "log", (Screen(1), Screen(2)))
    assert workers.process.wait(60) == 7
    workers.close()


def test_a_stopped_worker_obeys_term(tmp_path: Path) -> None:
    script = "import os, signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); "
    workers = WorkerProcesses(
        [sys.executable, "-c", script + "os.kill(os.getpid(), 19)"], tmp_path / "log", (Screen(1), Screen(2))
    )
    while psutil.Process(workers.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    workers.send(signal.SIGTERM)
    assert workers.process.wait(60) == 7
    workers.close()


def test_killing_workers_also_kills_every_process_they_started(tmp_path: Path) -> None:
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    workers = WorkerProcesses([sys.executable, "-c", script], tmp_path / "log", (Screen(1), Screen(2)))
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text().endswith("\n"):
        pass
    workers.send(9)
    workers.close()
    grandchild = ProcessId.of(int((tmp_path / "log").read_text()))
    deadline = time.monotonic() + 10  # a killed process ends a moment later on a busy machine
    while grandchild.is_alive():
        assert time.monotonic() < deadline


def test_a_directory_with_an_owner_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "out")
    run = RunDirectory(tmp_path / "out").create()
    with RunLock(run.lock) as lock:
        lock.acquire("launch")
        with pytest.raises(RunLocked, match="belongs to a running launch"):
            supervise(config)
    assert os.listdir(run.path) == [".lock"]


def test_a_command_that_cannot_start_ends_with_its_reason(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "out")
    code = supervise(config, options=LaunchOptions(command=lambda *_: [sys.executable, "-c", "raise SystemExit(2)"]))
    assert code == 2
    assert [event["event"] for event in read_events(RunDirectory(tmp_path / "out"))] == ["start", "end"]


def test_a_halt_since_the_launch_began_is_not_stale(tmp_path: Path) -> None:
    config, run = tiny_config(tmp_path / "out"), RunDirectory(tmp_path / "out").create()
    run.halt.touch()
    options = LaunchOptions(command=lambda *_: [sys.executable, "-c", "raise SystemExit(3)"], started=time.time() - 60)
    assert supervise(config, options=options) == 3
    assert "stale_halt" not in [event["event"] for event in read_events(run)]


def test_events_hold_the_reason_and_the_evidence_and_survive_a_cut(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path), []
    events = EventLog(run, by="watchdog", say=said.append)
    alarm = Alarm("dead_rank", "stall", "rank 1 is dead", 1, {"ranks": {"1": {"phase": "progress"}}})
    events.record_alarm(alarm)
    write_anomaly(run, alarm)
    with open(run.events, "a") as file:
        file.write('{"ts": 1, "ev')
    (event,) = read_events(run)
    assert (event["event"], event["by"], event["reason"]) == ("dead_rank", "watchdog", "rank 1 is dead")
    assert event["evidence"]["ranks"]["1"]["phase"] == "progress" and event["evidence"]["rank"] == 1
    assert said == ["[watchdog] dead_rank: rank 1 is dead"]
    assert run.anomaly.read_text() == "dead_rank\nrank 1 is dead\n"
    json.dumps(event)
