"""The `[tamis]` lines of every command and process, and the status line that a training run rewrites in place.

Output that cannot be written never ends the work. A supervisor sets LIVE_VARIABLE for workers whose output ends on a
terminal, and `LogFilter` keeps rewritten lines out of the log.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

PREFIX = "[tamis] "
LIVE_VARIABLE = "TAMIS_LIVE"  # "1" for workers whose output ends on a terminal
_CONTROL = [*range(9), *range(11, 32), *range(0x7F, 0xA0)]  # without tab and line feed
_DIRECTION = [0x61C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)  # alone they cannot be encoded
_ESCAPED = (*_CONTROL, *_DIRECTION, *_SURROGATES)
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _ESCAPED}
REWRITE = "\r\x1b[K"  # back to the start of the line, and clear it


def printable(text: object) -> str:
    """Show control and bidirectional characters as escapes, so that foreign text cannot steer a terminal.

    Line ends and tabs stay.
    """
    return str(text).translate(_ESCAPES)


def printable_line(text: object) -> str:
    """The same in one line: line ends become spaces."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def counted(count: int, noun: str) -> str:
    """`1 process`, `2 processes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print one `[tamis]` line to stdout or `stream`."""
    write(f"{PREFIX}{printable(text)}\n", stream)


def print_line(text: object, stream: TextIO | None = None) -> None:
    """Print a line without the prefix; escapes in names and messages are shown as escapes."""
    write(f"{printable(text)}\n", stream)


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


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that the caller closed (`>&-`).

    Otherwise the next file that is opened takes the number of one, and output of children lands in it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  None where it was closed
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def replace_unencodable() -> None:
    """Let stdout and stderr show `?` for characters that a locale without UTF-8 lacks, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


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


class LogFilter:
    """Turns what a terminal receives into what a log keeps: of a rewritten line, only its last state."""

    def __init__(self) -> None:
        self._held = b""  # an unfinished line that may be rewritten

    def feed(self, data: bytes) -> bytes:
        *ended, last = (self._held + data).split(b"\n")
        is_live = b"\r" in last  # every other line reaches the log at once, even when a crash cuts it short
        self._held = last if is_live else b""
        lines = [line.rsplit(REWRITE.encode(), 1)[-1] for line in ended]
        return b"".join(line + b"\n" for line in lines) + (b"" if is_live else last)
