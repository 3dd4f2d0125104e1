"""What TERM, INT, HUP and .HALT do to a trainer that asks at each step boundary."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.lock import ProcessId
from tamis.run.limits import Grace
from tamis.run.worker.sidecar import LOOK_EVERY_S, SUPERVISOR_VARIABLE, TERM_DEADLINE_S, Sidecar
from tamis.run.worker.signals import LEAVE_AFTER_S, StopSignals

PATIENCE_S = 120.0  # a hang must fail the test; what is healthy takes a small part of it

WORKER = """
import sys, time
from tamis.run.files.directory import RunDirectory
from tamis.run.worker.signals import EXIT_CODE_OF, StopSignals
signals = StopSignals(RunDirectory(sys.argv[1]), int(sys.argv[3]))
print("ready", flush=True)
while not signals.stop_requested:
    time.sleep(0.01)
print("saving", flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(EXIT_CODE_OF[signals.stop_requested])
"""


def start(
    out: Path, save_s: float = 0.0, rank: int = 0, stderr: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(out), str(save_s), str(rank)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
    )
    read_line(worker, "ready")
    return worker


def read_line(worker: subprocess.Popen[str], expected: str) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_it_save_and_leave_with_four(tmp_path: Path, number: int) -> None:
    worker = start(tmp_path, save_s=0.2)
    worker.send_signal(number)
    assert worker.wait(PATIENCE_S) == 4


def test_a_message_that_cannot_be_written_does_not_prevent_the_save(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    worker = start(tmp_path, stderr=full)
    os.close(full)
    worker.send_signal(signal.SIGHUP)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_S) == 4


def test_the_second_term_ends_it_at_once(tmp_path: Path) -> None:
    worker = start(tmp_path, save_s=1000.0)
    worker.terminate()
    read_line(worker, "saving")
    worker.terminate()
    _, said = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 4
    assert "second signal: exiting at once" in said  # not by the deadline of the first, which has the same code


def test_under_torchrun_the_same_term_arriving_twice_counts_once(tmp_path: Path) -> None:
    worker = start(tmp_path, save_s=0.5, TORCHELASTIC_RUN_ID="x")
    worker.terminate()
    read_line(worker, "saving")
    worker.terminate()
    _, said = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 4
    assert "SIGTERM received" in said and "second signal" not in said


def test_a_halt_file_is_for_rank_zero_to_see(tmp_path: Path) -> None:
    zero, one = start(tmp_path), start(tmp_path, rank=1)
    RunDirectory(tmp_path).halt.touch()
    assert zero.wait(PATIENCE_S) == 3
    assert one.poll() is None
    one.terminate()
    assert one.wait(PATIENCE_S) == 4


def test_a_hangup_changes_nothing(tmp_path: Path) -> None:
    worker = start(tmp_path)
    worker.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert worker.poll() is None
    worker.terminate()
    assert worker.wait(PATIENCE_S) == 4


def read_until(terminal: int, wanted: bytes) -> bytes:
    """What a terminal shows up to `wanted`, or for as long as we wait: a line may come in several parts."""
    seen = b""
    while wanted not in seen and select.select([terminal], [], [], PATIENCE_S)[0]:
        seen += os.read(terminal, 100)
    return seen


def test_a_lost_terminal_does_not_wait_for_the_reader_of_a_fifo(tmp_path: Path) -> None:
    master, slave = os.openpty()
    os.mkfifo(RunDirectory(tmp_path).train_log)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), "0", "0"], stdout=slave, stderr=slave)
    os.close(slave)
    assert b"ready" in read_until(master, b"ready\r\n")
    worker.send_signal(signal.SIGHUP)
    assert b"terminal is gone" in read_until(master, b"terminal is gone")
    worker.terminate()
    assert worker.wait(PATIENCE_S) == 4
    os.close(master)


def test_a_lost_terminal_is_replaced_by_the_log(tmp_path: Path) -> None:
    """A worker whose output is a terminal that goes away."""
    master, slave = os.openpty()
    wait = "import os\nwhile not os.path.exists(sys.argv[1] + '/lost'): time.sleep(0.01)\n"
    code = WORKER.replace("while not", f"{wait}print('after the hangup', flush=True)\nwhile not")
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "0", "0"], stdout=slave, stderr=slave)
    os.close(slave)
    assert b"ready" in read_until(master, b"ready\r\n")
    os.close(master)
    worker.send_signal(signal.SIGHUP)
    (tmp_path / "lost").touch()
    log = RunDirectory(tmp_path).train_log
    while worker.poll() is None and not (log.exists() and "after the hangup" in log.read_text()):
        time.sleep(0.01)
    worker.terminate()
    assert worker.wait(PATIENCE_S) == 4
    assert "after the hangup" in log.read_text()


def test_a_worker_whose_supervisor_is_gone_is_asked_to_stop(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(["sleep", "1000"])
    worker = start(tmp_path, **{SUPERVISOR_VARIABLE: str(ProcessId.of(supervisor.pid))})
    supervisor.kill()
    supervisor.wait()
    assert worker.wait(PATIENCE_S) == 4


def test_a_worker_too_stuck_to_obey_is_killed_at_the_deadline(tmp_path: Path, monkeypatch) -> None:
    stuck = subprocess.Popen(["sleep", "1000"])
    now = [100.0]
    monkeypatch.setattr("tamis.run.worker.sidecar.time.monotonic", lambda: now[0])
    sidecar = Sidecar(RunDirectory(tmp_path), 0, ProcessId.of(stuck.pid), tmp_path / "raw")
    sidecar.on_signal(signal.SIGTERM)
    now[0] += 23.9
    sidecar.enforce_deadline()
    assert stuck.poll() is None
    now[0] += 0.2
    sidecar.enforce_deadline()
    assert stuck.wait(PATIENCE_S) == -signal.SIGKILL


def test_the_deadlines_leave_no_process_alive_25_seconds_after_term() -> None:
    """The worker's own comes first, so that its exit code tells; the sidecar's holds for whatever is stuck."""
    assert LEAVE_AFTER_S + 1 < TERM_DEADLINE_S
    assert TERM_DEADLINE_S + LOOK_EVERY_S < 25
    assert Grace().term_s > 25  # the supervisor does not kill a worker that is still saving in time


def test_a_second_term_brings_the_deadline_forward(tmp_path: Path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tamis.run.worker.sidecar.time.monotonic", lambda: now[0])
    sidecar = Sidecar(RunDirectory(tmp_path), 0, ProcessId(1, 0), tmp_path / "raw")
    sidecar.on_signal(signal.SIGTERM)
    sidecar.on_signal(signal.SIGTERM)
    assert sidecar.kill_at == 101.0


def test_after_closing_signals_mean_what_they_meant_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    signals = StopSignals(RunDirectory(tmp_path), 0)
    signals.close()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    os.kill(os.getpid(), signal.SIGUSR1)  # a late request for stacks does no harm
