"""The halt file: `touch OUT/.HALT` asks a run to stop at the next step boundary, with a checkpoint."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tamis.run.files.console import announced, print_line
from tamis.run.files.directory import RunDirectory
from tamis.run.files.lock import RunLock
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.files.reading import OddFile, read_text
from tamis.run.files.records import write_text_atomic

MOST_REASON_BYTES = 64 << 10


class HaltFile:
    """One run's .HALT. A start discards a stale one; the process that stops for it consumes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)  # RunDirectory.halt

    def request(self, reason: str) -> None:
        write_text_atomic(self.path, reason + "\n")

    def requested(self, since_ts: float | None = None) -> bool:
        """True if a halt is requested; with `since_ts`, only one written at that Unix time or later counts."""
        written = self._written()
        return written is not None and (since_ts is None or written >= since_ts)

    def reason(self) -> str:
        """The text of the file; a folder, a FIFO or a link of that name asks for a halt too."""
        try:
            return read_text(self.path, MOST_REASON_BYTES).strip() or "asked for by .HALT"
        except OSError as error:
            return f"asked for by .HALT ({error})" if isinstance(error, OddFile) else "asked for by .HALT"

    def consume(self) -> str:
        """Remove the file, so that it cannot end the next run too; returns its reason. A folder is renamed."""
        reason = self.reason()
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                self.path.rename(self.path.with_name(f".HALT_folder_{time.time_ns()}"))
        return reason

    def _written(self) -> float | None:
        try:
            return self.path.lstat().st_mtime
        except OSError:
            return None

    def discard_stale(self, since_ts: float) -> str | None:
        """Remove a file left from before `since_ts`, and return the sentence to report; None when there is none."""
        written = self._written()
        if written is None or written >= since_ts:
            return None
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        return f"ignored and removed a stale {self.path.name} from {when} ({self.consume()})"


def halt_run(run: RunDirectory, reason: str, wait_s: float) -> int:
    """Write .HALT and wait for the run to stop (`tamis halt`).

    Returns 0 when the run has stopped or `wait_s` is 0, and 1 when nothing runs or the run goes on.
    """
    if not _is_running(run):
        print_line(f"nothing runs in {run.path}: there is nothing to halt")
        return 1
    HaltFile(run.halt).request(reason)
    print_line(f"asked {run.path} to halt at the next step boundary: {reason}")
    if wait_s == 0:
        return 0
    deadline = time.monotonic() + wait_s
    with announced("waiting for the end of the step and its checkpoint"):
        while _is_running(run) and time.monotonic() < deadline:
            time.sleep(0.2)
    if _is_running(run):
        print_line(f"still running after {wait_s:g} s: {run.halt} stays, tamis monitor {run.path} shows what it does")
        return 1
    step = latest_valid_checkpoint(run)
    print_line(
        "stopped; there is no checkpoint yet" if step is None else f"stopped; newest checkpoint {run.checkpoint(step)}"
    )
    return 0


def _is_running(run: RunDirectory) -> bool:
    """True if a launch, a supervisor or a trainer holds the directory."""
    return any(RunLock(lock).is_held() for lock in (run.launch_lock, run.lock, run.trainer_lock))
