"""After the end: the command that stops the machine, what cancels it, and reminders of a machine that costs money."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tamis.config import Config
from tamis.run.after_end import AfterEnd
from tamis.run.cost import CostMeter
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, read_events
from tamis.run.files.lock import RunLock
from tamis.run.notify.notifier import notified
from tests.run.notify.launches import config_for
from tests.run.notify.receiver import PATIENCE_S, Receiver


@pytest.fixture
def receiver(receiving) -> Receiver:
    return receiving()


@pytest.fixture
def ended(tmp_path: Path, receiver: Receiver) -> Callable[..., list[str]]:
    """End a launch with these keys and this code; returns the events after `end`."""

    def end(*, code: int = 0, idle_hours: float = 0.0, **cost: Any) -> list[str]:
        config = config_for(
            tmp_path / "out", cost={"per_hour": 2.49, "grace_s": 0.0} | cost, notify={"idle_hours": idle_hours}
        )
        return after_end(config, code, receiver)

    return end


def after_end(config: Config, code: int, receiver: Receiver) -> list[str]:
    out = RunDirectory(config.train.out_dir).create()
    with notified(config, out, CostMeter(config, out), [f"http://{receiver.place}/"]) as notifier:
        EventLog(out, by="supervisor").record("end", "all steps are done", exit_code=code)
        AfterEnd(config, out, notifier, time.time() - 60).run(code)
    return [event["event"] for event in read_events(out)][1:]


def when(condition: Callable[[], object], then: Callable[[], object]) -> None:
    """Do something, in a thread, as soon as a condition holds."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (holds := condition()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if holds:
            then()

    threading.Thread(target=wait, daemon=True).start()


def test_the_command_runs_once_and_its_output_is_kept(tmp_path: Path, ended) -> None:
    script = "import sys; print('stopping', sys.argv[1])"
    assert ended(on_end=[sys.executable, "-c", script, "$HOME; rm"]) == ["on_end"]
    assert (tmp_path / "out" / "on_end.log").read_text().splitlines()[1:] == ["stopping $HOME; rm"]


def test_a_machine_with_the_only_copy_of_a_checkpoint_is_not_stopped(tmp_path: Path, receiver: Receiver) -> None:
    on_end = {"on_end": ["/bin/true"], "grace_s": 0.0}
    config = config_for(tmp_path / "out", cost=on_end, copy={"to": f"file://{tmp_path}/there"})
    assert after_end(config, 0, receiver) == ["on_end_failed"]
    reason = read_events(RunDirectory(tmp_path / "out"))[-1]["reason"]
    assert "the newest checkpoint is not copied to copy.to" in reason


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            [sys.executable, "-c", "raise SystemExit(9)"],
            "ended with exit code 9; the machine still costs 2.49 $ an hour",
        ),
        (["/no/such/program"], "No such file or directory"),
    ],
)
def test_a_command_that_fails_is_recorded_and_the_operator_hears_of_it(
    tmp_path, ended, receiver, command, reason
) -> None:
    assert ended(on_end=command) == ["on_end_failed"]
    assert reason in read_events(RunDirectory(tmp_path / "out"))[-1]["reason"]
    assert "on_end_failed" in receiver.events()


def test_keep_cancels_the_command_during_the_grace_period(tmp_path: Path, ended, receiver) -> None:
    def end_is_announced() -> bool:
        return any(
            "touch" in message["message"] and ".KEEP cancels" in message["message"] for message in receiver.accepted
        )

    when(end_is_announced, (tmp_path / "out" / ".KEEP").touch)
    assert ended(on_end=["touch", str(tmp_path / "ran")], grace_s=3600.0) == ["kept"]
    assert not (tmp_path / "ran").exists() and "kept" in receiver.events()


def test_another_launch_cancels_the_command(tmp_path: Path, ended) -> None:
    with RunLock(RunDirectory(tmp_path / "out").create().launch_lock) as lock:
        lock.acquire("launch")
        assert ended(on_end=["touch", str(tmp_path / "ran")], grace_s=3600.0) == ["kept"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("code", [2, 4])
def test_a_wrong_config_or_a_signal_leads_to_no_command(ended, code: int) -> None:
    assert ended(on_end=["/no/such/program"], code=code) == []


def test_reminders_come_until_a_signal(ended, receiver) -> None:
    when(lambda: receiver.events().count("idle") >= 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert ended(idle_hours=1e-5) == []
    reminder = next(message for message in receiver.accepted if message["event"] == "idle")
    assert reminder["message"] == "ended 0:00 ago; the machine still costs 2.49 $ an hour"
