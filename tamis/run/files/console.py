"""The `[tamis]` lines of every command and process. Output that cannot be written never ends the work."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print one `[tamis]` line to stdout or `stream`."""
    write(f"[tamis] {text}\n", stream)


def write(text: str, stream: TextIO | None = None) -> None:
    """Write to stdout or `stream` and flush. A closed pipe, a full disk or an ASCII locale is no error."""
    stream = stream or sys.stdout
    with contextlib.suppress(OSError):  # the output is gone; the work is not
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def discard_unwritable_output() -> None:
    """Flush stdout and stderr before the process ends; what fails goes to /dev/null.

    Otherwise Python's own flush at exit fails and replaces the exit code by 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
