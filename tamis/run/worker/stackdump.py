"""SIGUSR1 writes the native stacks of every thread to OUT/stackdump_rank{R}_pid{P}_{time}.txt, and training goes on.

A process blocked in C, or looping with the GIL held, cannot write its own stacks. So three things work together:
Python's C signal handler tells a sidecar process through a pipe (`signal.set_wakeup_fd`, no GIL needed); the
sidecar runs py-spy on us; and faulthandler, which needs no GIL either, leaves the Python stacks in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_text_atomic

PY_SPY_TIMEOUT_S = 60.0
_PR_SET_PTRACER = 0x59616D61
_PACKAGE_ROOT = str(Path(__file__).parents[3])  # the sidecar must find us also when tamis runs from a checkout


class StackDumps:
    """The sidecar of this process and what leads to it, until `close`."""

    def __init__(self, sidecar: subprocess.Popen[bytes], pipe: int, raw_file: IO[bytes], before: Any) -> None:
        self.sidecar, self._pipe, self._raw_file, self._before = sidecar, pipe, raw_file, before

    def close(self) -> None:
        """End the sidecar; a late SIGUSR1 must not end the process, so it is ignored where it had no handler."""
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if self._before == signal.SIG_DFL else self._before)
        signal.set_wakeup_fd(-1)
        _open_pipes.discard(self._pipe)
        os.close(self._pipe)
        self._raw_file.close()
        self.sidecar.wait()


def install(run_dir: RunDirectory | str | Path, rank: int) -> StackDumps:
    """Start the sidecar of this process and route SIGUSR1 to it; call from the main thread.

    The sidecar also sees TERM and INT, and ends a process that is too stuck to obey them (`tamis.run.worker.sidecar`).
    """
    run = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    raw = raw_dump_path(run, rank, os.getpid())
    raw_file = open(raw, "w+b")  # noqa: SIM115  faulthandler writes to it for the life of the process
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sidecar = subprocess.Popen(
        [sys.executable, "-m", "tamis.run.worker.sidecar", str(run.path), str(rank), str(os.getpid()), str(raw)],
        stdin=reader,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,  # Ctrl-C and a lost terminal are not for the sidecar
    )
    os.close(reader)
    _let_it_trace(sidecar.pid)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)  # a signal without handler would tell nobody
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _open_pipes.add(writer)
    faulthandler.register(signal.SIGUSR1, file=raw_file, all_threads=True, chain=True)
    return StackDumps(sidecar, writer, raw_file, before)


_open_pipes: set[int] = set()


def _forget_the_sidecar() -> None:
    """In a forked helper of the worker: its signals are not the worker's."""
    if not _open_pipes:
        return
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
    while _open_pipes:
        os.close(_open_pipes.pop())


os.register_at_fork(after_in_child=_forget_the_sidecar)


def raw_dump_path(run: RunDirectory, rank: int, pid: int) -> Path:
    """Where faulthandler writes; hidden, because it exists before anybody asked for a dump."""
    return run.path / f".stacks_rank{rank}_pid{pid}.raw"


def write_stackdump(run: RunDirectory, rank: int, pid: int, python_stacks: str = "") -> Path:
    """Dump the process `pid` from outside, and return the file; a tool that fails is named in it."""
    moment = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment)) + f"{moment % 1:.3f}"[1:].replace(".", "_")
    path = run.path / f"stackdump_rank{rank}_pid{pid}_{stamp}.txt"
    sections = [
        f"rank {rank}, pid {pid}, {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))} UTC",
        "== threads as the kernel sees them\n" + _kernel_threads(pid),
        "== native and Python stacks (py-spy)\n" + _py_spy(pid),
        "== Python stacks (faulthandler)\n" + (python_stacks or "none: the process did not handle the signal\n"),
    ]
    write_text_atomic(path, "\n\n".join(sections))
    return path


def _py_spy(pid: int) -> str:
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if tool is None:
        return "py-spy is not installed: `pip install py-spy` adds native stacks\n"
    try:
        result = subprocess.run(
            [tool, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy failed: {error}\n"
    return result.stdout or f"py-spy failed: {result.stderr.strip()} (it needs root or CAP_SYS_PTRACE in containers)\n"


def _kernel_threads(pid: int) -> str:
    """State and waiting place of each thread: tells a stopped or disk-bound process from a busy one, without a tool."""
    lines = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
                waiting = (task / "wchan").read_text() or "-"
                lines.append(f"thread {task.name} {name}: state {rest.split()[0]}, waits in {waiting}")
    return "\n".join(lines or ["the process is gone"]) + "\n"


def _let_it_trace(pid: int) -> None:
    """Under Yama's default a child may not trace its parent unless the parent says so; elsewhere this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
