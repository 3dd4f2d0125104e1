"""Stacks of a process are written whatever it is doing, and it goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.lock import ProcessId
from tamis.run.worker.sidecar import SUPERVISOR_VARIABLE, write_stack_dump

WORKER = """
import ctypes, sys, time
from tamis.run.files.directory import RunDirectory
from tamis.run.worker.signals import StopSignals
signals = StopSignals(RunDirectory(sys.argv[1]), 3)
print("ready", flush=True)

def stands_still(how):
    if how == "blocked in C":
        ctypes.CDLL(None).pause()       # releases the GIL; a signal ends it
    if how == "spinning with the GIL":
        spin = ctypes.c_int(1)
        library = ctypes.PyDLL(None)    # keeps the GIL
        library.pthread_spin_unlock(ctypes.byref(spin))
        library.pthread_spin_lock(ctypes.byref(spin))
        library.pthread_spin_lock(ctypes.byref(spin))

stands_still(sys.argv[2])
while not signals.stop_requested:
    time.sleep(0.01)
print("goes on until", signals.stop_requested, flush=True)
"""


def start(out: Path, how: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(out), how], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    return worker


def dumps_after(run: RunDirectory, count: int) -> list[Path]:
    deadline = time.monotonic() + 120
    while len(run.stackdumps()) < count:
        assert time.monotonic() < deadline, "no stack dump was written"
        time.sleep(0.02)
    return run.stackdumps()


@pytest.mark.parametrize("how", ["running", "blocked in C"])
def test_each_usr1_writes_one_dump_and_the_process_continues(tmp_path: Path, how: str) -> None:
    run, worker = RunDirectory(tmp_path), start(tmp_path, how)
    for count in (1, 2):
        os.kill(worker.pid, signal.SIGUSR1)
        dumps_after(run, count)
    for dump in run.stackdumps():
        assert dump.name.startswith(f"stackdump_rank3_pid{worker.pid}_")
        text = dump.read_text()
        assert "MainThread" in text and "faulthandler" in text and "state" in text
    worker.terminate()
    rest, _ = worker.communicate(timeout=120)
    assert "goes on until term" in rest


def test_a_stopped_worker_whose_supervisor_dies_is_continued_so_that_it_can_save(tmp_path: Path, monkeypatch) -> None:
    supervisor = subprocess.Popen(["sleep", "1000"])
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(ProcessId.of(supervisor.pid)))
    worker = start(tmp_path, "running")
    os.kill(worker.pid, signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    rest, _ = worker.communicate(timeout=120)
    assert "goes on until term" in rest


def test_a_process_that_holds_the_gil_forever_is_dumped_with_its_native_frame(tmp_path: Path) -> None:
    run, worker = RunDirectory(tmp_path), start(tmp_path, "spinning with the GIL")
    try:
        os.kill(worker.pid, signal.SIGUSR1)
        (dump,) = dumps_after(run, 1)
        text = dump.read_text()
        assert "pthread_spin_lock" in text  # native, from outside
        assert text.count("stands_still") >= 2  # Python, from outside and from faulthandler
    finally:
        worker.kill()
        worker.communicate()


def test_a_stopped_process_can_be_dumped_from_outside(tmp_path: Path) -> None:
    worker = start(tmp_path, "running")
    try:
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(0.1)
        text = write_stack_dump(RunDirectory(tmp_path), 3, worker.pid).read_text()
        assert "state T" in text or "state t" in text
    finally:
        worker.kill()
        worker.communicate()


def test_the_dump_of_a_process_that_is_gone_states_it(tmp_path: Path) -> None:
    text = write_stack_dump(RunDirectory(tmp_path), 0, 2**22 - 3).read_text()
    assert "the process is gone" in text and "py-spy failed" in text


def test_nothing_is_left_behind_when_the_worker_ends(tmp_path: Path) -> None:
    worker = start(tmp_path, "running")
    worker.kill()
    worker.communicate()
    deadline = time.monotonic() + 120
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, f"left behind: {list(tmp_path.iterdir())}"
        time.sleep(0.05)


def test_without_py_spy_the_python_stacks_are_there_and_the_remedy_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tamis.run.worker.sidecar.shutil.which", lambda *_, **__: None)
    text = write_stack_dump(RunDirectory(tmp_path), 0, os.getpid(), "File x, line 3").read_text()
    assert "pip install py-spy" in text and "File x, line 3" in text and f"thread {os.getpid()}" in text
