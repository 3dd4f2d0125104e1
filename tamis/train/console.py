"""What a person sees while a run starts and trains: timed stages, then one live line (or plain lines in a log)."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator

from tamis.run.files.console import REWRITE, ends_on_terminal, print_error, say, styled, write

Z_LEAST = 10  # with fewer earlier values a z-score means nothing
Z_WINDOW = 128  # steps a loss is compared with
Z_SHOWN = 4.0  # z-scores from here on are printed
RATE_WINDOW = 50  # steps whose median time gives the ETA


class Console:
    """Output of one rank. Only rank 0 prints; errors are printed by every rank, with its number.

    Output that cannot be written (full disk, closed pipe, ASCII locale) never ends training.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.live = rank == 0 and ends_on_terminal(sys.stdout)
        self._line_open = False

    def say(self, text: str) -> None:
        """Print a line of rank 0."""
        if self.rank != 0:
            return
        if self._line_open:
            write("\n")
            self._line_open = False
        say(text)

    def error(self, text: str) -> None:
        """Print an error of this rank to stderr."""
        who = f" on rank {self.rank}" if self.world_size > 1 else ""
        print_error(f"error{who}: {text}")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a start-up stage when it begins, and its time when it ends."""
        started = time.monotonic()
        self.say(f"{name} …")
        yield
        self.say(f"{name}: {time.monotonic() - started:.1f} s")

    def step(self, text: str, is_logged: bool) -> None:
        """Print a logged step; on a terminal, show the other steps in one line that is rewritten each time."""
        if self.live:
            # A line that wraps cannot be rewritten, so it is cut to the terminal; logged lines stay whole.
            shown = text if is_logged else text[: shutil.get_terminal_size().columns - 1]
            write(REWRITE + " | ".join(map(_styled_cell, shown.split(" | "))) + ("\n" if is_logged else ""))
            self._line_open = not is_logged
        elif self.rank == 0 and is_logged:
            write(f"{text}\n")


def _styled_cell(cell: str) -> str:
    """A cell of a step's line: unusual values in yellow, the loss in bold."""
    style = "yellow" if cell.endswith("σ)") else "bold" if cell.startswith("loss") else None
    return styled(cell, style, sys.stdout) if style else cell


class ZScore:
    """How unusual a value is among the earlier ones, in standard deviations."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=Z_WINDOW)

    def of(self, value: float) -> float | None:
        """The z-score, or None with fewer than Z_LEAST earlier values."""
        earlier = list(self._seen)
        self._seen.append(value)
        if len(earlier) < Z_LEAST:
            return None
        mean = sum(earlier) / len(earlier)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in earlier) / len(earlier))
        return (value - mean) / deviation if deviation > 0 else 0.0


def unusual(z: float | None) -> str:
    """` (+5.1σ)` for a value that far from the mean of the recent ones, in standard deviations; else empty."""
    return f" ({z:+.1f}σ)" if z is not None and abs(z) >= Z_SHOWN else ""


class Pace:
    """Median time of the recent steps, for the ETA."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RATE_WINDOW)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def eta(self, steps_left: int) -> str:
        if not self._seconds:
            return "?"
        median = sorted(self._seconds)[len(self._seconds) // 2]
        return duration(median * steps_left)


def duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole % 60:02d}s"
