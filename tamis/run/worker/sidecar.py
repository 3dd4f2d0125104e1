"""A small process beside each worker that acts when the worker cannot: dumps its stacks, ends it when it is too stuck
to obey TERM within the deadline, and asks it to stop when its supervisor is gone. Dies with the worker.

`python -m tamis.run.worker.sidecar OUT RANK PID RAW` with the worker's signal numbers, one byte each, on stdin.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.live import LIVE_VARIABLE, REWRITE
from tamis.run.files.lock import ProcessId
from tamis.run.worker.stackdump import write_stackdump

TERM_DEADLINE_S = 24.0  # the contract says 25 from the signal to the end of the process
SECOND_TERM_DEADLINE_S = 1.0  # the worker exits at once by itself, unless it is stuck in C
LOOK_EVERY_S = 0.5
SUPERVISOR_VARIABLE = "TAMIS_SUPERVISOR"  # pid and start time of the supervisor, set for its workers


def echo_window_s() -> float:
    """`pkill -f` reaches torchrun and its workers, and torchrun passes its own on: that TERM is the first one again."""
    return 2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0


class Sidecar:
    def __init__(self, run: RunDirectory, rank: int, worker: ProcessId, raw: Path) -> None:
        self.run, self.rank, self.worker, self.raw = run, rank, worker, raw
        self.supervisor = ProcessId.parse(os.environ.get(SUPERVISOR_VARIABLE, ""))
        self.asked_at = 0.0  # monotonic; when the first TERM or INT came
        self.kill_at: float | None = None
        self.own_term_pending = False  # we sent a TERM that will be reported to us as any other
        self.raw_read = 0

    def watch(self) -> None:
        """Until the worker is gone: its end of the pipe closes, or its process is no longer there."""
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
        time.sleep(0.1)  # faulthandler writes in the same signal handler that woke us
        try:
            path = write_stackdump(self.run, self.rank, self.worker.pid, self._fresh_python_stacks())
            self.say(f"stacks of rank {self.rank} written to {path}")
        except OSError as error:
            self.say(f"stacks of rank {self.rank} could not be written: {error}")

    def end_orphan(self) -> None:
        """A worker nobody supervises would train on unseen, and collide with the next launch."""
        if self.supervisor and self.kill_at is None and not self.supervisor.is_alive():
            self.say(f"the supervisor is gone: asking rank {self.rank} to save and leave")
            self.asked_at = time.monotonic()
            self.kill_at = self.asked_at + TERM_DEADLINE_S
            self.own_term_pending = True
            self.worker.send(signal.SIGTERM)

    def enforce_deadline(self) -> None:
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.say(f"rank {self.rank} did not leave in time after TERM: killing it")
            self.worker.send(signal.SIGKILL)

    def say(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the screen may be gone
            live = os.environ.get(LIVE_VARIABLE) == "1"  # then a line that is being rewritten may stand there
            print(f"{REWRITE if live else ''}[tamis] {message}", flush=True)

    def _fresh_python_stacks(self) -> str:
        with contextlib.suppress(OSError), open(self.raw, encoding="utf-8", errors="replace") as file:
            file.seek(self.raw_read)
            text = file.read()
            self.raw_read = file.tell()
            return text
        return ""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever stops a whole group must not disarm the deadline
    out, rank, pid, raw = sys.argv[1:]
    sidecar = Sidecar(RunDirectory(out), int(rank), ProcessId.of(int(pid)), Path(raw))
    try:
        sidecar.watch()
    finally:
        Path(raw).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
