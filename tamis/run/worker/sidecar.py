"""A small process next to each worker that acts when the worker cannot.

It dumps the worker's stacks on SIGUSR1, kills a worker that does not obey TERM within the deadline, and asks it to stop
when its supervisor is gone. It exits with the worker.

A process blocked in C, or looping with the GIL held, cannot write its own stacks. Three parts work together: Python's
C signal handler notifies the sidecar through a pipe (`signal.set_wakeup_fd`, no GIL needed); the sidecar runs py-spy on
the worker; and faulthandler, which needs no GIL either, writes the Python stacks in any case.

`python -m tamis.run.worker.sidecar OUT RANK PID RAW` reads the worker's signal numbers, one byte each, from stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from tamis.run.files.console import REWRITE, ends_on_terminal, say, write
from tamis.run.files.directory import RunDirectory
from tamis.run.files.lock import ProcessId
from tamis.run.files.records import open_new, write_text_atomic

TERM_DEADLINE_S = 24.0  # the contract: 25 s from the signal to the end of the process
SECOND_TERM_DEADLINE_S = 1.0  # the worker exits at once, unless it is stuck in C
LOOK_EVERY_S = 0.5
PY_SPY_TIMEOUT_S = 60.0
SUPERVISOR_VARIABLE = "TAMIS_SUPERVISOR"  # pid and start time of the supervisor, set for its workers
_PR_SET_PTRACER = 0x59616D61
_PACKAGE_ROOT = str(Path(__file__).parents[3])  # on PYTHONPATH for the sidecar, when tamis runs from a checkout


class SidecarHandle:
    """The worker's side: its sidecar process, the pipe to it, and the handlers of SIGUSR1, until `close`."""

    def __init__(self, sidecar: subprocess.Popen[bytes], pipe: int, raw_file: IO[bytes], before: Any) -> None:
        self.sidecar, self._pipe, self._raw_file, self._before = sidecar, pipe, raw_file, before

    def close(self) -> None:
        """End the sidecar. A late SIGUSR1 is ignored where it had no handler, because it would end the process."""
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if self._before == signal.SIG_DFL else self._before)
        signal.set_wakeup_fd(-1)
        _open_pipes.discard(self._pipe)
        os.close(self._pipe)
        self._raw_file.close()
        self.sidecar.wait()


def start_sidecar(run: RunDirectory, rank: int) -> SidecarHandle:
    """Start the sidecar of this process and route signals to it; call from the main thread."""
    raw = raw_dump_path(run, rank, os.getpid())
    raw_file = open_new(raw, "w+b")  # faulthandler writes to it for the life of the process
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sidecar = subprocess.Popen(
        [sys.executable, "-m", "tamis.run.worker.sidecar", str(run.path), str(rank), str(os.getpid()), str(raw)],
        stdin=reader,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,  # Ctrl-C and a lost terminal are not for the sidecar
    )
    os.close(reader)
    _allow_tracing(sidecar.pid)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)  # without a handler nothing reaches the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _open_pipes.add(writer)
    faulthandler.register(signal.SIGUSR1, file=raw_file, all_threads=True, chain=True)
    return SidecarHandle(sidecar, writer, raw_file, before)


_open_pipes: set[int] = set()


def _detach_forked_child() -> None:
    """Close the pipe in a forked helper of the worker: its signals are not the worker's."""
    if not _open_pipes:
        return
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
    while _open_pipes:
        os.close(_open_pipes.pop())


os.register_at_fork(after_in_child=_detach_forked_child)


def raw_dump_path(run: RunDirectory, rank: int, pid: int) -> Path:
    """Where faulthandler writes; a hidden file, because it exists before any dump is requested."""
    return run.path / f".stacks_rank{rank}_pid{pid}.raw"


def _allow_tracing(pid: int) -> None:
    """Let a child trace this process, which Yama's default forbids; without Yama this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def echo_window_s() -> float:
    """How long a second TERM counts as the first: `pkill -f` reaches torchrun too, which forwards its own."""
    return 2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0


class Sidecar:
    """The sidecar's side: watches one worker until it is gone."""

    def __init__(self, run: RunDirectory, rank: int, worker: ProcessId, raw: Path) -> None:
        self.run, self.rank, self.worker, self.raw = run, rank, worker, raw
        self.supervisor = ProcessId.parse(os.environ.get(SUPERVISOR_VARIABLE, ""))
        self.asked_at = 0.0  # monotonic time of the first TERM or INT
        self.kill_at: float | None = None
        self.own_term_pending = False  # this sidecar sent a TERM, which the pipe reports like any other
        self.raw_read = 0

    def watch(self) -> None:
        """Run until the worker's end of the pipe closes or its process is gone."""
        while self.worker.is_alive():
            ready, _, _ = select.select([0], [], [], LOOK_EVERY_S)
            numbers = os.read(0, 512) if ready else b""
            if ready and not numbers:
                return
            for number in numbers:
                self.on_signal(number)
            self.end_orphan()
            self.enforce_deadline()

    def on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.dump()
        elif number in (signal.SIGTERM, signal.SIGINT):
            now = time.monotonic()
            if self.own_term_pending:
                self.own_term_pending = False
            elif self.kill_at is None:
                self.asked_at, self.kill_at = now, now + TERM_DEADLINE_S
            elif now - self.asked_at >= echo_window_s():
                self.kill_at = min(self.kill_at, now + SECOND_TERM_DEADLINE_S)

    def dump(self) -> None:
        time.sleep(0.1)  # faulthandler writes in the same signal handler that woke this process
        try:
            path = write_stack_dump(self.run, self.rank, self.worker.pid, self._new_python_stacks())
            self.report(f"stacks of rank {self.rank} written to {path}")
        except OSError as error:
            self.report(f"stacks of rank {self.rank} could not be written: {error}")

    def end_orphan(self) -> None:
        """Ask a worker without a supervisor to stop: it would train on unwatched and collide with the next launch."""
        if self.supervisor and self.kill_at is None and not self.supervisor.is_alive():
            self.report(f"the supervisor is gone: asking rank {self.rank} to save and exit")
            self.asked_at = time.monotonic()
            self.kill_at = self.asked_at + TERM_DEADLINE_S
            self.own_term_pending = True
            self.worker.send(signal.SIGTERM)

    def enforce_deadline(self) -> None:
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.report(f"rank {self.rank} did not exit in time after TERM: killing it")
            self.worker.send(signal.SIGKILL)

    def report(self, message: str) -> None:
        if ends_on_terminal(sys.stdout):  # a status line may stand there
            write(REWRITE)
        say(message)

    def _new_python_stacks(self) -> str:
        with contextlib.suppress(OSError), open(self.raw, encoding="utf-8", errors="replace") as file:
            file.seek(self.raw_read)
            text = file.read()
            self.raw_read = file.tell()
            return text
        return ""


def write_stack_dump(run: RunDirectory, rank: int, pid: int, python_stacks: str = "") -> Path:
    """Write OUT/stackdump_rank{R}_pid{P}_{time}.txt of a process from outside; a tool that fails is named in it."""
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
    """State and wait channel of each thread, read without a tool: shows a stopped or disk-bound process."""
    lines = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
                waiting = (task / "wchan").read_text() or "-"
                lines.append(f"thread {task.name} {name}: state {rest.split()[0]}, waits in {waiting}")
    return "\n".join(lines or ["the process is gone"]) + "\n"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole group must not disable the deadline
    out, rank, pid, raw = sys.argv[1:]
    sidecar = Sidecar(RunDirectory(out), int(rank), ProcessId.of(int(pid)), Path(raw))
    try:
        sidecar.watch()
    finally:
        Path(raw).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
