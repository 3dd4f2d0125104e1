"""The worker processes of one attempt: started in their own session, output streamed to the terminal and the log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import psutil

from tamis.run.files.console import LIVE_VARIABLE, LogFilter
from tamis.run.files.lock import ProcessId
from tamis.run.files.reading import open_to_append
from tamis.run.worker.sidecar import SUPERVISOR_VARIABLE

FOUND_BY = "scripts/train_showcase.py"  # operators stop and inspect runs with pkill -f and pgrep -f of this name
PIPE_BYTES = 1 << 20  # enough for what a worker prints while it saves, after its reader was killed
FROZEN_AFTER_S = 0.5  # a terminal that accepts nothing for so long counts as frozen


def trainer_command(config_yaml: Path, processes: int, checkpoint: Path | None) -> list[str]:
    """The trainer's command line: python for one process, torchrun for several."""
    worker = [sys.executable, "-u", "-X", FOUND_BY, "-m", "tamis.train.main", "--config", str(config_yaml)]
    worker += ["--resume", str(checkpoint)] if checkpoint else []
    if processes == 1:
        return worker
    return [*torchrun_command(processes), "--no-python", *worker]


def torchrun_command(processes: int) -> list[str]:
    """torchrun for the processes of this machine, which no other machine can reach."""
    return [sys.executable, "-u", "-m", "tamis.train.tools.torchrun", "--nproc_per_node", str(processes)]


class Screen:
    """Standard output (1) or error (2), which may close or freeze without blocking the training behind it."""

    def __init__(self, number: int = 1) -> None:
        self._descriptor: int | None = _own_stream(number)
        self._frozen = False

    def write(self, data: bytes) -> None:
        """Write to the terminal. A frozen one loses lines; the log has them."""
        try:
            while data and self._accepts_more():
                data = data[self._put(data) :]
        except OSError:
            self._descriptor = None

    def say(self, message: str) -> None:
        self.write(message.encode() + b"\n")

    def _accepts_more(self) -> bool:
        if self._descriptor is None:
            return False
        patience_s = 0.0 if self._frozen else FROZEN_AFTER_S
        self._frozen = not select.select([], [self._descriptor], [], patience_s)[1]
        return not self._frozen

    def _put(self, data: bytes) -> int:
        assert self._descriptor is not None
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # a terminal may accept less than select reports
            time.sleep(0.01)
            return 0


def _own_stream(number: int) -> int:
    """A standard stream opened again where it can block: O_NONBLOCK then applies to this process alone."""
    try:
        if stat.S_ISREG(os.fstat(number).st_mode):
            return number
        return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return number


def _screen_variables() -> dict[str, str]:
    """Tell workers, whose output is a pipe, which streams end on a terminal and how wide it is."""
    live = {LIVE_VARIABLE: "".join(str(number) for number in (1, 2) if os.isatty(number))}
    return live | ({"COLUMNS": str(os.get_terminal_size(1).columns)} if os.isatty(1) else {})


def worker_environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "TAMIS_NOTIFY"},  # no use for its secrets
        "PYTHONUNBUFFERED": "1",
        SUPERVISOR_VARIABLE: str(ProcessId.of(os.getpid())),
        **_screen_variables(),
    }


class WorkerProcesses:
    """The trainer's processes of one attempt."""

    def __init__(
        self, command: Sequence[str], log: Path, screens: tuple[Screen, Screen], stdin: int = subprocess.DEVNULL
    ) -> None:
        file = _open_log(log)  # before there are workers: once they run, someone may move OUT
        (out, to_out), (errors, to_errors) = _large_pipe(), _large_pipe()
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=to_out,
            stderr=to_errors,
            env=worker_environment(),
            pass_fds=(out, errors),  # they stay open when the supervisor is killed, so that workers can print and save
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which then stops the workers in order
        )
        os.close(to_out)
        os.close(to_errors)
        streams = dict(zip((out, errors), screens, strict=True))
        self._streaming = threading.Thread(target=_stream, args=(streams, file), daemon=True)
        self._streaming.start()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def send(self, number: int) -> None:
        """Send TERM to the started process, which forwards it, and continue stopped ones; KILL goes to all of them."""
        everything = self._everything()
        if number == signal.SIGKILL:
            _send(number, everything)
        else:
            _send(number, [self.process])
            _send(signal.SIGCONT, everything)

    def close(self) -> None:
        """Wait for the exit and the last output, but not for a helper that still holds the pipe."""
        self.process.wait()
        self._streaming.join(timeout=5.0)

    def _everything(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            return []


def _send(number: int, processes: Iterable[psutil.Process | subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(number)


def _open_log(path: Path) -> IO[bytes]:
    """The log, or /dev/null where a folder, a FIFO or the permissions are in the way."""
    try:
        return open_to_append(path)
    except OSError:
        return open(os.devnull, "ab", buffering=0)


def _large_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    with contextlib.suppress(OSError):  # a user who has many large pipes gets a small one
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


def _stream(screens: dict[int, Screen], log: IO[bytes]) -> None:
    """Copy the workers' output until both pipes close; they are emptied even if terminal and log fail."""
    filters = {pipe: LogFilter() for pipe in screens}
    with log:
        while filters:
            for pipe in select.select(list(filters), [], [])[0]:  # stdout first: it explains the error that follows
                if data := os.read(pipe, 1 << 16):
                    screens[pipe].write(data)
                    with contextlib.suppress(OSError):  # a full disk costs the log, not the run
                        log.write(filters[pipe].feed(data))
                else:
                    del filters[pipe]
                    os.close(pipe)
