"""The copying process next to a launch: it never fails a run, finishes the newest checkpoint first, and survives it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tamis.config.schema import Copy
from tamis.run import launch
from tamis.run.copies import child_process
from tamis.run.copies.child_process import is_copied, run_with_copies
from tamis.run.copies.copier import CopyRefused
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import HeartbeatWriter
from tamis.run.files.lock import RunLock
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import snapshot_text
from tamis.run.supervise.supervisor import LaunchOptions, supervise
from tests.faults.launched import fake_command, tiny_config, weights_after
from tests.run.copies.saved_run import save, saved_run

PATIENCE_S = 120.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


def state(run: RunDirectory) -> dict:
    return json.loads(run.copies.read_text()) if run.copies.exists() else {}


def events(run: RunDirectory, kind: str) -> list[dict]:
    return [event for event in read_events(run) if event["event"] == kind]


def test_a_launch_is_copied_and_continues_on_a_fresh_machine_as_if_unbroken(tmp_path: Path, monkeypatch) -> None:
    quick = LaunchOptions(command=fake_command, look_every_s=0.05)
    monkeypatch.setattr(launch, "supervise", lambda config, **_: supervise(config, options=quick))
    monkeypatch.setattr(launch, "LAUNCH_LOGS", tmp_path / "train_runs")
    there = tmp_path / "there"
    config = tiny_config(tmp_path / "out", steps=10).model_copy(update={"copy": Copy(to=f"file://{there}")})
    job = launch.Job(config, "mine.yaml", 1, [], 0, time.time())
    assert launch.launch_once(job) == 0
    run = RunDirectory(tmp_path / "out")
    assert is_copied(run) and events(run, "copied")
    assert {path.name for path in there.glob("step*")} == {"step5", "step10"}
    assert (there / "events.jsonl").stat().st_size and str(there) not in run.config_yaml.read_text()
    assert "copied: step 10" in snapshot_text(read_snapshot(run.path, gpus=[]))

    monkeypatch.setattr(launch, "_passes_quick_preflight", lambda job: True)
    monkeypatch.setattr(launch, "finish_run", lambda *_: None)
    fresh = tmp_path / "fresh"
    monkeypatch.setenv("NSA_ACCUM", "2")  # which train.batch_tokens replaces
    words = [f"train.out_dir={fresh}", "train.steps=20", "train.batch_tokens=65536"]
    assert launch.main_job(None, words, copy_url=f"file://{there}") == 0
    line = RunDirectory(fresh).checkpoint(20).read_text().split("\n")[0]
    assert json.loads(line) == [20, weights_after(20)] and is_copied(RunDirectory(fresh))
    rows = [int(row.split(",")[0]) for row in RunDirectory(fresh).training_csv.read_text().splitlines()[1:]]
    assert rows == list(range(1, 21))
    with pytest.raises(CopyRefused, match="Nothing was started"):  # the machine of before wakes up
        launch.launch_once(job)


def test_after_term_the_newest_checkpoint_is_copied_before_older_ones(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "out", 5)

    def work() -> int:
        until(lambda: state(run).get("copying_step") == 5)
        save(run, 10)
        HeartbeatWriter(run.heartbeat(0), 0).beat("halted", 10, exit_code=4)
        until(lambda: state(run).get("newest_step") == 10)  # while the launch still writes its report
        return ExitCode.PREEMPTED

    copy = Copy(to=f"file://{tmp_path}/there", max_mbps=16)
    assert run_with_copies(copy, run, work) == ExitCode.PREEMPTED
    assert [event["evidence"]["step"] for event in events(run, "copied")] == [10, 5]


def test_a_copying_process_that_dies_is_started_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(child_process, "LOOK_EVERY_S", 0.1)
    run = saved_run(tmp_path / "out", 5)

    def work() -> int:
        until(lambda: state(run).get("copying_step") == 5)
        first = RunLock(run.copy_lock).owner_process()
        assert first is not None
        first.send(signal.SIGKILL)
        until(lambda: RunLock(run.copy_lock).owner_process() not in (None, first))
        return 0

    assert run_with_copies(Copy(to=f"file://{tmp_path}/there", max_mbps=16), run, work) == 0
    assert is_copied(run) and not (run.path / ".copying").exists()


def test_a_supervisor_that_dies_leaves_a_process_that_copies_what_is_there(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "out")
    command = [sys.executable, "-m", "tamis.run.copies.upload_loop", str(run.path), f"file://{tmp_path}/there"]
    process = subprocess.Popen([*command, "--keep", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout and json.loads(process.stdout.readline())["state"] == "ready"
    save(run, 5)
    process.send_signal(signal.SIGTERM)  # to the whole group, as a scheduler sends it
    process.stdin.close()  # as the kernel does when the supervisor is gone
    assert process.wait(PATIENCE_S) == 0 and is_copied(run)
    process.stdout.close()


def test_a_place_that_cannot_be_written_stops_a_first_start_and_never_a_run(tmp_path: Path, capsys) -> None:
    run = saved_run(tmp_path / "out")
    (tmp_path / "there").write_text("a file, not a folder")
    copy = Copy(to=f"file://{tmp_path}/there")
    with pytest.raises(CopyRefused, match=r"copy\.to is file://.*: File exists.*Nothing was started"):
        run_with_copies(copy, run, lambda: pytest.fail("it must not start"))
    save(run, 5)

    def work() -> int:
        until(lambda: events(run, "copy_failed"))
        assert any("File exists" in alert.text for alert in read_snapshot(run.path, gpus=[]).alerts)
        (tmp_path / "there").unlink()
        until(lambda: state(run).get("newest_step") == 5)
        return 0

    assert run_with_copies(copy, run, work) == 0
    assert [event["event"] for event in read_events(run) if event["by"] == "copier"][-1] in ("copied", "copy_recovered")
    assert "NOTHING IS COPIED" in capsys.readouterr().out and state(run)["problem"] is None
