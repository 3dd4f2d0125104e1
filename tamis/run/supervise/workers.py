"""The processes of one attempt at a run: started in their own session, their output streamed to screen and log."""

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
from collections.abc import Sequence
from pathlib import Path

import psutil

from tamis.run.files.live import LIVE_VARIABLE, LogFilter
from tamis.run.files.lock import ProcessId
from tamis.run.worker.sidecar import SUPERVISOR_VARIABLE

FOUND_BY = "scripts/train_showcase.py"  # operators stop and inspect runs with pkill -f and pgrep -f of this name
PIPE_BYTES = 1 << 20  # room for what a worker prints while it saves, should nobody read it any more
FROZEN_AFTER_S = 0.5  # a screen that takes nothing for so long stands still


def trainer_command(config_yaml: Path, processes: int, checkpoint: Path | None) -> list[str]:
    """How the trainer is started: by python alone, or by torchrun when there are several processes."""
    worker = [sys.executable, "-u", "-X", FOUND_BY, "-m", "tamis.train.main", "--config", str(config_yaml)]
    worker += ["--resume", str(checkpoint)] if checkpoint else []
    if processes == 1:
        return worker
    torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [*torchrun, "--no-python", *worker]


class Screen:
    """Standard output that can go away, or stand still, without holding up the training behind it."""

    def __init__(self) -> None:
        self._descriptor: int | None = _own_standard_output()
        self._stands_still = False

    def write(self, data: bytes) -> None:
        """What a terminal that stands still does not take is lost on the screen; the log has it."""
        try:
            while data and self._takes_more():
                data = data[self._put(data) :]
        except OSError:
            self._descriptor = None

    def say(self, message: str) -> None:
        self.write(message.encode() + b"\n")

    def _takes_more(self) -> bool:
        if self._descriptor is None:
            return False
        patience_s = 0.0 if self._stands_still else FROZEN_AFTER_S
        self._stands_still = not select.select([], [self._descriptor], [], patience_s)[1]
        return not self._stands_still

    def _put(self, data: bytes) -> int:
        assert self._descriptor is not None
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # a terminal may have room for less than it says
            time.sleep(0.01)
            return 0


def _own_standard_output() -> int:
    """Standard output opened again, where it can block: so that not blocking is our affair and not the shell's too."""
    try:
        if stat.S_ISREG(os.fstat(1).st_mode):
            return 1
        return os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return 1


def _screen_variables() -> dict[str, str]:
    """A worker's output is a pipe: it must be told whether a terminal is behind it, and how wide that is."""
    if not os.isatty(1):
        return {LIVE_VARIABLE: "0"}
    return {LIVE_VARIABLE: "1", "COLUMNS": str(os.get_terminal_size(1).columns)}


class Workers:
    def __init__(self, command: Sequence[str], log: Path, screen: Screen) -> None:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            SUPERVISOR_VARIABLE: str(ProcessId.of(os.getpid())),
            **_screen_variables(),
        }
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env=environment,
            pass_fds=(reader,),  # so that printing does not fail when we are killed, and it can still save
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then stops the workers in order
        )
        os.close(writer)
        self._streaming = threading.Thread(target=_stream, args=(reader, log, screen), daemon=True)
        self._streaming.start()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def send(self, number: int) -> None:
        """TERM goes to the process we started, which hands it on; KILL goes to everything it has started."""
        for process in self._everything() if number == signal.SIGKILL else [self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(number)

    def close(self) -> None:
        """Wait for the last output; a helper that still holds the pipe is not waited for."""
        self.process.wait()
        self._streaming.join(timeout=5.0)

    def _everything(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            return []


def _stream(source: int, log: Path, screen: Screen) -> None:
    """Until everybody who could write has ended; whatever happens to screen and log, the pipe is emptied."""
    log_filter = LogFilter()
    with os.fdopen(source, "rb", buffering=0) as pipe, open(log, "ab", buffering=0) as file:
        while data := pipe.read(1 << 16):
            screen.write(data)
            with contextlib.suppress(OSError):  # a full disk costs the log, not the run
                file.write(log_filter.feed(data))
