"""The `[tamis]` lines of every command and process. Output that cannot be written never ends the work."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print one line to stdout or `stream` at once. A closed pipe, a full disk or an ASCII locale is no error."""
    stream = stream or sys.stdout
    line = f"[tamis] {text}"
    try:
        try:
            print(line, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:
        pass  # the output is gone; the work is not


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
