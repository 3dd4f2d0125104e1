"""The halt file: `touch OUT/.HALT` asks a run to stop at the next step boundary, with a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from tamis.run.files.records import write_text_atomic


class HaltFile:
    """One run's .HALT. Whoever starts the run discards a stale one; whoever stops for it consumes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)  # RunDirectory.halt

    def request(self, reason: str) -> None:
        write_text_atomic(self.path, reason + "\n")

    def requested(self, since_ts: float | None = None) -> bool:
        """Is a halt asked for; with `since_ts`, only one written at that Unix time or later counts."""
        try:
            written = self.path.stat().st_mtime
        except FileNotFoundError:
            return False
        return since_ts is None or written >= since_ts

    def reason(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").strip() or "asked for by .HALT"
        except OSError:
            return "asked for by .HALT"

    def consume(self) -> str:
        """Remove the file, so that it cannot end the next run too; returns its reason."""
        reason = self.reason()
        self.path.unlink(missing_ok=True)
        return reason

    def discard_stale(self, since_ts: float) -> str | None:
        """Remove a file left from before `since_ts`, and return the sentence to report; None when there is none."""
        try:
            written = self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        if written >= since_ts:
            return None
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        return f"ignored and removed a stale {self.path.name} from {when} ({self.consume()})"
