"""The `[tamis]` lines of every command and process, and the status lines that are rewritten in place on a terminal.

Output that cannot be written never ends the work. A supervisor sets LIVE_VARIABLE for workers whose output ends on a
terminal, and `LogFilter` keeps rewritten lines and colours out of the log.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

PREFIX = "[tamis] "
LIVE_VARIABLE = "TAMIS_LIVE"  # for workers: the numbers of the streams that end on a terminal, as "12"
REWRITE_EVERY_S, LOG_EVERY_S = 1.0, 30.0  # how often long work shows that it goes on, on a terminal and in a log
STYLES = {"bold": 1, "dim": 2, "red": 31, "yellow": 33}
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


def ends_on_terminal(stream: TextIO) -> bool:
    """True for a terminal, and in a worker whose supervisor shows the stream on one."""
    number = "2" if stream is sys.stderr else "1"
    return stream.isatty() or number in os.environ.get(LIVE_VARIABLE, "")


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text in bold or in a colour where `stream` ends on a terminal and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not ends_on_terminal(stream):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print one `[tamis]` line to stdout or `stream`."""
    write(f"{styled(PREFIX, 'dim', stream or sys.stdout)}{printable(text)}\n", stream)


def print_error(text: str) -> None:
    """Print an error to stderr."""
    head, colon, rest = printable(text).partition(":")
    write(f"{styled(head + colon, 'red', sys.stderr)}{rest}\n", sys.stderr)


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


class StatusLine:
    """A line of a terminal that is rewritten in place; anything else that is printed clears it first."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.RLock()
        self._is_shown, self._is_line_open = False, False

    def show(self, text: str) -> None:
        with self._lock:
            if not self._is_line_open:  # of other output
                write(REWRITE + printable_line(text)[: shutil.get_terminal_size().columns - 1], self._stream)
                self._is_shown = True

    def clear(self) -> None:
        if self._is_shown:
            write(REWRITE, self._stream)
        self._is_shown = False

    def write_above(self, stream: TextIO, text: str) -> int:
        with self._lock:
            self.clear()
            self._is_line_open = not text.endswith("\n")
            return stream.write(text)


class _AboveStatus:
    """A stream to the terminal of a status line, which it clears before it writes."""

    def __init__(self, stream: TextIO, status: StatusLine) -> None:
        self._stream, self._status = stream, status

    def write(self, text: str) -> int:
        return self._status.write_above(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def announced(work: str) -> Iterator[Callable[[object], None]]:
    """Announce long work on stderr, and show that it goes on; yields a function that takes how far it is, in words.

    On a terminal one line is rewritten every second. In a log a line follows every 30 s.
    """
    say(f"{work} …", sys.stderr)
    began, done, reached, stderr = time.monotonic(), threading.Event(), [""], sys.stderr
    status = StatusLine(stderr) if stderr.isatty() else None

    def tell(how_far: object) -> None:
        reached[0] = f"{how_far}, "

    def remind() -> None:
        while not done.wait(LOG_EVERY_S if status is None else REWRITE_EVERY_S):
            text = f"still {work}, {reached[0]}{time.monotonic() - began:.0f} s so far"
            say(text, stderr) if status is None else status.show(PREFIX + text)

    thread = threading.Thread(target=remind, daemon=True, name="announced")
    thread.start()
    try:
        with contextlib.ExitStack() as streams:
            if status is not None:
                streams.enter_context(contextlib.redirect_stderr(cast(TextIO, _AboveStatus(stderr, status))))
                if sys.stdout.isatty():
                    streams.enter_context(contextlib.redirect_stdout(cast(TextIO, _AboveStatus(sys.stdout, status))))
            yield tell
    finally:
        done.set()
        thread.join()
        if status is not None:
            status.clear()


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
    """Turns what a terminal receives into what a log keeps: no colours, and of a rewritten line only its last state."""

    _COLOUR = re.compile(rb"\x1b\[\d+m")

    def __init__(self) -> None:
        self._held = b""  # an unfinished line that may be rewritten, or cut within a colour

    def feed(self, data: bytes) -> bytes:
        *ended, last = (self._held + data).split(b"\n")
        # Every plain line reaches the log at once, even when a crash cuts it short.
        is_live = b"\r" in last or b"\x1b" in last
        self._held = last if is_live else b""
        lines = [line.rsplit(REWRITE.encode(), 1)[-1] for line in ended]
        return self._COLOUR.sub(b"", b"".join(line + b"\n" for line in lines) + (b"" if is_live else last))
