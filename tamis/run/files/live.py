"""The line that is rewritten in place while a run trains: how a worker marks it, and how a log leaves it out."""

from __future__ import annotations

LIVE_VARIABLE = "TAMIS_LIVE"  # set for workers whose output ends on a terminal
REWRITE = "\r\x1b[K"  # back to the start of the line, and clear it


class LogFilter:
    """Passes on what stays on the screen; a line that was rewritten counts only as it was when it ended."""

    def __init__(self) -> None:
        self._held = b""  # a line that may yet be rewritten

    def feed(self, data: bytes) -> bytes:
        *ended, last = (self._held + data).split(b"\n")
        is_live = b"\r" in last  # any other line reaches the log at once, also when a crash cuts it short
        self._held = last if is_live else b""
        lines = [line.rsplit(REWRITE.encode(), 1)[-1] for line in ended]
        return b"".join(line + b"\n" for line in lines) + (b"" if is_live else last)
