"""Halting, stopping and leaving alone a supervised run: .HALT, TERM, INT, a terminal that freezes or goes away."""

import os
import signal
import time

import pytest

from tamis.run.files.events import read_events
from tamis.run.files.lock import ProcessId
from tests.faults.launched import PATIENCE_S, assert_ends_as_unbroken

HELD = {"FAKE_HOLD": "7"}  # stands inside step 7 until it is let go on


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_halt_mid_step_stops_all_ranks_at_one_step_and_the_relaunch_ends_as_if_unbroken(launching, ranks) -> None:
    launched = launching(ranks=ranks, **HELD)
    launched.until_step(7)
    launched.run.halt.touch()
    launched.run.halt.touch()  # twice is once
    launched.let_go_on()
    assert launched.wait() == 3, launched.told()
    assert not launched.run.halt.exists()
    ends = [launched.beats(rank)[-1] for rank in range(ranks)]
    assert {(beat.phase, beat.step) for beat in ends} == {("halted", ends[0].step)}
    assert launched.run.checkpoints()[-1] == ends[0].step
    again = launching(ranks=ranks)
    assert again.wait() == 0, again.told()
    assert_ends_as_unbroken(again)


def test_a_halt_file_of_an_earlier_run_is_reported_and_ignored(launching, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".HALT").write_text("of yesterday\n")
    os.utime(tmp_path / "out" / ".HALT", (time.time() - 86400,) * 2)
    launched = launching(steps=10)
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert launched.events()[0] == "stale_halt" and "of yesterday" in launched.told()


def test_a_halt_while_the_run_waits_to_restart_is_honoured(launching) -> None:
    launched = launching(fault={"kind": "kill", "step": 13, "always": True}, FIRST_DELAY_S="60")
    launched.until(lambda: "restart" in launched.events())
    launched.run.halt.touch()
    assert launched.wait() == 3, launched.told()
    assert not launched.run.halt.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_that_gets_term_lets_the_workers_save(launching, number: int) -> None:
    launched = launching(ranks=2, FAKE_STEP_S="0.05", **HELD)
    launched.until_step(7)
    launched.process.send_signal(number)
    launched.until(lambda: "term" in launched.events())
    launched.let_go_on()
    assert launched.wait() == 4, launched.told()
    assert launched.run.checkpoints()[-1] >= 7
    again = launching(ranks=2)
    assert again.wait() == 0, again.told()
    assert_ends_as_unbroken(again)


def test_a_supervisor_that_gets_term_twice_kills_the_workers(launching) -> None:
    launched = launching(fault={"kind": "hang_in_compute", "step": 7}, PATIENCE="1", TERM_S="20")
    launched.until_step(7)
    worker = ProcessId.of(launched.worker_pid())
    launched.process.terminate()
    launched.until(lambda: "term" in launched.events())
    launched.process.terminate()
    assert launched.wait() == 4, launched.told()
    assert not worker.is_alive()
    (kill,) = [event for event in read_events(launched.run) if event["event"] == "kill"]
    assert kill["reason"].startswith("asked to stop a second time")


def test_workers_that_do_not_leave_after_term_are_killed(launching) -> None:
    launched = launching(fault={"kind": "hang_in_compute", "step": 7}, PATIENCE="1")
    launched.until_step(7)
    launched.process.terminate()
    assert launched.wait() == 4, launched.told()
    assert launched.events() == ["start", "term", "kill", "end"]


def test_a_worker_that_gets_term_is_not_restarted(launching) -> None:
    """The operator's `pkill -f train_showcase.py`."""
    launched = launching(**HELD)
    launched.until_step(7)
    os.kill(launched.worker_pid(), signal.SIGTERM)
    launched.let_go_on()
    assert launched.wait() == 4, launched.told()
    assert launched.events() == ["start", "end"]


def test_a_detached_launch_returns_at_once_and_trains_on_in_its_own_session(launching) -> None:
    launched = launching(steps=20, detach=True)
    assert launched.wait() == 0
    assert "launched in the background" in launched.told() and f"tamis halt {launched.run.path}" in launched.told()
    deadline = time.monotonic() + PATIENCE_S
    while not (launched.run.events.exists() and launched.events()[-1] == "end"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert_ends_as_unbroken(launched)
    assert read_events(launched.run)[0]["pid"] != launched.process.pid
    assert "rank 0 begins" in launched.run.train_log.read_text() and "rank 0 begins" not in launched.told()


def test_a_frozen_terminal_does_not_hold_up_the_training(launching) -> None:
    master, slave = os.openpty()  # master is never read
    launched = launching(stdout=slave, steps=20, FAKE_CHATTER="20000")
    assert launched.wait() == 0
    assert_ends_as_unbroken(launched)
    assert launched.run.train_log.read_text().count("x" * 20000) == 20
    os.close(master)
    os.close(slave)


def test_a_screen_that_went_away_does_not_end_the_training(launching) -> None:
    reader, writer = os.pipe()
    launched = launching(stdout=writer, steps=20, FAKE_CHATTER="100")
    os.close(writer)
    os.close(reader)
    assert launched.wait() == 0
    assert_ends_as_unbroken(launched)
