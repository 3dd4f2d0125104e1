"""One owner per run directory, and process identities that a reused pid cannot fake."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import HeartbeatWriter
from tamis.run.files.lock import ProcessId, RunLock, RunLocked, this_host

HOLDER = """
import sys, time
from tamis.run.files.lock import RunLock
RunLock(sys.argv[1]).acquire("launch")
print("held", flush=True)
time.sleep(1000)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_the_second_owner_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    holder = hold(tmp_path / ".lock")
    lock = RunLock(tmp_path / ".lock")
    assert lock.is_held()
    with pytest.raises(RunLocked, match=rf"running launch \(pid {holder.pid} on .*train.out_dir"):
        lock.acquire("launch")
    holder.kill()
    holder.wait()


def test_the_lock_of_a_killed_owner_is_free_and_remembers_it(tmp_path: Path) -> None:
    holder = hold(tmp_path / ".lock")
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path / ".lock")
    assert not lock.is_held()
    owner = lock.owner()
    assert owner is not None and owner["pid"] == holder.pid
    lock.acquire("launch")
    assert (lock.owner() or {})["pid"] == os.getpid()


def test_a_released_lock_has_no_owner(tmp_path: Path) -> None:
    with RunLock(tmp_path / ".lock") as lock:
        lock.acquire("launch")
        assert lock.is_held()
    assert lock.owner() is None and not RunLock(tmp_path / ".lock").is_held()


def test_a_process_is_distinguished_from_a_later_one_with_its_pid() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    mine = ProcessId.of(process.pid)
    assert mine.state() == "running" and ProcessId.parse(str(mine)) == mine
    impostor = ProcessId(process.pid, mine.started + 1)
    impostor.send(signal.SIGKILL)
    assert mine.is_alive() and not impostor.is_alive()
    mine.send(signal.SIGSTOP)
    while mine.state() != "stopped":
        time.sleep(0.01)
    mine.send(signal.SIGKILL)
    while mine.is_alive():
        time.sleep(0.01)
    assert mine.state() == "dead"  # though its parent has not waited for it yet
    process.wait()


@pytest.mark.parametrize("text", ["", "12", "a:b", "12:"])
def test_what_is_not_a_process_is_none(text: str) -> None:
    assert ProcessId.parse(text) is None


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_is_untouched(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(OSError, match=r"\.lock is not a lock file but a link.*remove it"):
        RunLock(tmp_path / ".lock").acquire("launch")
    assert target.read_text() == "keep me"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="is not a regular file"):
        RunLock(tmp_path / "fifo").acquire("launch")
    assert not RunLock(tmp_path / "fifo").is_held() and RunLock(tmp_path / "fifo").owner() is None


def test_a_check_that_refuses_changes_no_byte(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        RunLock(tmp_path / ".lock").acquire("launch", refuse)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").write_text("the owner that was killed")
    answers = iter([None, ValueError("only under the lock")])

    def refuse_later() -> None:
        if error := next(answers):
            raise error

    with pytest.raises(ValueError, match="only under the lock"):
        RunLock(tmp_path / ".lock").acquire("launch", refuse_later)
    assert (tmp_path / ".lock").read_text() == "the owner that was killed"
    assert not RunLock(tmp_path / ".lock").is_held()


def test_a_process_of_another_host_is_unknown_and_never_signalled(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    mine = ProcessId.of(process.pid)
    assert ProcessId.recorded(process.pid, mine.started, this_host()) == mine
    foreign = ProcessId.recorded(process.pid, mine.started, "elsewhere:00000000")
    foreign.send(signal.SIGKILL)
    assert (foreign.state(), mine.state()) == ("unknown", "running")
    with RunLock(tmp_path / ".lock") as lock:
        lock.acquire("launch")
        assert lock.owner_process() == ProcessId.of(os.getpid())
    process.kill()
    process.wait()


def test_the_host_of_a_process_is_recorded_without_its_name(tmp_path):
    writer = HeartbeatWriter(RunDirectory(tmp_path).heartbeat(0), 0)
    writer.beat("boot", 0)
    text = RunDirectory(tmp_path).heartbeat(0).read_text()
    assert this_host() in text and socket.gethostname() not in text
    with RunLock(tmp_path / ".lock") as lock:
        lock.acquire("launch")
        assert socket.gethostname() in lock.refusal()
    assert (tmp_path / ".lock").read_text() == ""
