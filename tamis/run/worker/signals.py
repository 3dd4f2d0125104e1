"""Stop requests of a trainer as one property, read at each step boundary: `stop_requested`.

TERM or INT: save, then exit within 25 s; a second one exits at once. HUP: the terminal is lost; training continues and
its output goes to OUT/train.log. USR1: stack dump. `.HALT`: save and stop, all ranks together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Literal

from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.reading import open_to_append
from tamis.run.worker.sidecar import SUPERVISOR_VARIABLE, echo_window_s, start_sidecar

StopReason = Literal["halt", "term", "int"]
LEAVE_AFTER_S = 22.0  # from TERM to the exit without a new checkpoint; the sidecar kills two seconds later
EXIT_CODE_OF = {
    "halt": ExitCode.HALTED,
    "term": ExitCode.PREEMPTED,
    "int": ExitCode.PREEMPTED,
}


def is_supervised() -> bool:
    """True if a supervisor owns the directory. It has removed a stale .HALT, so one there now is a request."""
    return SUPERVISOR_VARIABLE in os.environ


class StopSignals:
    """The signal handlers of one rank, and its sidecar. Create it early, in the main thread.

    Only rank 0 reads `.HALT` and passes it to the others: all ranks must stop at the same step.
    """

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._halt = HaltFile(run.halt) if rank == 0 else None
        self._signalled: StopReason | None = None
        self._signalled_at = 0.0
        self._on_terminal = [stream for stream in (1, 2) if os.isatty(stream)]  # False for a terminal that is gone
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop, signal.SIGHUP: self._on_hangup}
        has_parent = is_supervised() or "TORCHELASTIC_RUN_ID" in os.environ
        self._parent = os.getppid() if has_parent else None  # a shell that started this process may exit
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._sidecar = start_sidecar(run, rank)

    def close(self) -> None:
        """Restore the earlier handlers when training is over.

        Not after TERM: the process must then be gone within 25 s, whatever hangs on the way out.
        """
        if self._signalled is not None:
            return
        self._sidecar.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stop_requested(self) -> StopReason | None:
        if self._parent is not None and os.getppid() != self._parent:
            return self._signalled or "term"  # torchrun or the supervisor is gone
        if self._signalled is None and self._halt and self._halt.requested():
            return "halt"
        return self._signalled

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._signalled is not None:
            if time.monotonic() - self._signalled_at < echo_window_s():
                return
            _tell("second signal: exiting at once, the last checkpoint is valid")
            os._exit(ExitCode.PREEMPTED)
        self._signalled = "term" if number == signal.SIGTERM else "int"
        self._signalled_at = time.monotonic()
        name = signal.Signals(number).name
        _tell(f"rank {self._rank}: {name} received, saving a checkpoint and exiting")
        deadline = threading.Timer(LEAVE_AFTER_S, self._leave_without_saving)
        deadline.daemon = True
        deadline.start()

    def _leave_without_saving(self) -> None:
        """Exit from a thread: the step may wait for data, another rank or a compiler, and never reach its end."""
        _tell(f"rank {self._rank}: no step boundary in time, exiting; the last checkpoint is valid")
        os._exit(ExitCode.PREEMPTED)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Send output to the log: a write to a terminal that is gone fails, and would end the run."""
        with contextlib.suppress(OSError):  # a full or lost disk
            if self._on_terminal:
                with open_to_append(self._run.train_log) as log:  # never waits, as for the reader of a FIFO
                    for stream in self._on_terminal:
                        os.dup2(log.fileno(), stream)
        _tell("the terminal is gone (SIGHUP): training continues")


def _tell(text: str) -> None:
    """Write to stderr without Python's buffers. In a signal handler an error would end the run instead of saving it."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
