"""The state of a run without heartbeats, from its locks, events and preflight."""

import os
import time

import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.lock import RunLock
from tamis.run.monitor.snapshot import read_snapshot

STARTING = "no heartbeat yet: the launch is running its checks or starting workers"


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [(4, "the run ended: preempted", "halted"), (3, "the run ended: halted", "halted"), (2, "damaged", "failed")],
)
def test_a_launch_that_ended_before_the_first_heartbeat_is_not_starting(tmp_path, code, reason, state):
    run = RunDirectory(tmp_path)
    (tmp_path / "preflight.json").write_text('{"verdict": "GO (8 passed)"}')
    EventLog(run, by="supervisor").record("end", reason, exit_code=code)
    EventLog(run, by="notifier").record("notify_failed", "no route")
    snapshot = read_snapshot(tmp_path, gpus=[])
    expected = f"{reason}, before the first heartbeat; there is no checkpoint, so a new launch starts at step 1"
    assert (snapshot.state, snapshot.headline) == (state, expected)
    (tmp_path / "preflight.json").write_text('{"verdict": "NO-GO (1 failed)"}')  # of a later launch
    os.utime(tmp_path / "preflight.json", (time.time() + 10,) * 2)
    assert read_snapshot(tmp_path, gpus=[]).state == "failed"
    with RunLock(run.launch_lock) as lock:
        lock.acquire("launch")
        assert read_snapshot(tmp_path, gpus=[]).headline == STARTING


def test_a_launch_that_was_killed_or_failed_at_its_checks_is_not_starting(tmp_path):
    run = RunDirectory(tmp_path)
    run.launch_lock.write_text('{"pid": 1}')  # as a killed process leaves it
    assert read_snapshot(tmp_path, gpus=[]).state == "crashed"
    run.launch_lock.write_text("")
    assert read_snapshot(tmp_path, gpus=[]).state == "starting"  # as a launch that is about to take its lock
    os.utime(run.launch_lock, (time.time() - 10,) * 2)
    assert read_snapshot(tmp_path, gpus=[]).state == "failed"
    with RunLock(run.trainer_lock) as lock:
        lock.acquire("trainer")
        assert read_snapshot(tmp_path, gpus=[]).headline == STARTING
