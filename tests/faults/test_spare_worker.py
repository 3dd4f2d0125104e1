"""The spare worker: takes over after a kill, is replaced by a usual start when it cannot, and never stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tamis.run.files.events import read_events
from tamis.run.files.lock import ProcessId
from tamis.run.supervise.spare import PRELOAD, SpareWorker
from tamis.run.supervise.worker_processes import Screen, WorkerProcesses
from tests.faults.launched import Launched, assert_ends_as_unbroken

AT_ONCE = {"TRAINER": "fake_module", "SPARE_AFTER_S": "0", "FAKE_HOLD": "7"}


def spare_of(launched: Launched, but: int = 0) -> ProcessId:
    """Wait until the supervisor has a spare worker."""
    found: list[int] = []

    def is_there() -> bool:
        children = psutil.Process(launched.process.pid).children()
        found[:] = [child.pid for child in children if PRELOAD in child.cmdline() and child.pid != but]
        return bool(found)

    launched.until(is_there)
    return ProcessId.of(found[0])


def kill_worker(launched: Launched) -> None:
    starts = launched.events().count("start")
    os.kill(launched.worker_pid(), signal.SIGKILL)
    launched.until(lambda: launched.events().count("start") > starts)


def test_the_spare_takes_over_after_a_kill_and_a_broken_one_is_replaced_by_a_usual_start(launching) -> None:
    launched = launching(steps=12, **AT_ONCE)
    first = spare_of(launched)
    launched.until(lambda: launched.beats()[-1].step == 7)
    kill_worker(launched)
    launched.until(lambda: launched.worker_pid() == first.pid and launched.beats()[-1].step == 7)
    second = spare_of(launched, but=first.pid)
    second.send(signal.SIGKILL)
    kill_worker(launched)
    launched.let_go_on()
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    starts = [event["evidence"]["spare"] for event in read_events(launched.run) if event["event"] == "start"]
    assert starts == [False, True, False]
    assert "rank 0 begins after step 5" in launched.run.train_log.read_text()


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM])
def test_the_spare_ends_with_its_supervisor(launching, ends_by: signal.Signals) -> None:
    launched = launching(steps=12, **AT_ONCE)
    spare = psutil.Process(spare_of(launched).pid)
    launched.process.send_signal(ends_by)
    launched.let_go_on()
    spare.wait(60)


@pytest.fixture
def start_spare(tmp_path: Path) -> Iterator[Callable[..., tuple[SpareWorker, list[str]]]]:
    spares: list[SpareWorker] = []

    def start(module: str = "tests.faults.fake_trainer") -> tuple[SpareWorker, list[str]]:
        spares.append(spare := SpareWorker(tmp_path / "log", (Screen(1), Screen(2))))
        command = [sys.executable, "-m", module, "--help"]
        spare.start(command)
        return spare, command

    yield start
    for spare in spares:
        spare.close()


def output_of(workers: WorkerProcesses | None, log: Path) -> str:
    assert workers is not None
    workers.close()
    return log.read_text()


def test_the_spare_runs_the_module_as_python_would(start_spare, tmp_path: Path) -> None:
    spare, command = start_spare()
    usual = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert output_of(spare.take(command), tmp_path / "log") == usual.stdout.replace(
        "fake_trainer.py", "fake_trainer.py"
    )


@pytest.mark.parametrize("change", ["environment", "module", "code", "stopped"])
def test_a_spare_that_is_not_what_a_usual_start_would_be_is_not_used(
    start_spare, monkeypatch, tmp_path: Path, change: str
) -> None:
    (tmp_path / "code.py").touch()
    monkeypatch.setattr("tamis.__file__", str(tmp_path / "code.py"))
    spare, command = start_spare()
    process = spare._workers.process
    if change == "environment":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    elif change == "module":
        command[2] = "tests.faults.paced_trainer"
    elif change == "code":
        os.utime(tmp_path / "code.py", (1, 1))
    else:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
    assert spare.take(command) is None
    assert process.returncode == -signal.SIGKILL
