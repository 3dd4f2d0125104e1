"""Files that grow while the monitor is open: the first look reads a bounded part, later ones only what was added."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from tamis.run.checks.evidence import parse_row
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import Heartbeat, HeartbeatFollower, previous_file, read_heartbeats
from tamis.run.files.reading import lines_after, open_to_read, sample_lines
from tamis.run.limits import JUDGED_STEPS
from tamis.run.supervise.usage import UsageSample, parse_usage, usage_csv

BEATS_OF_RANK_0 = 3000  # about a thousand steps: enough for recent curves and a steady ETA
BEATS_OF_OTHERS = 6 * JUDGED_STEPS  # three a step, and those of saves and evaluations
BYTES_PER_BEAT = 2048
SAMPLED_ROWS = 2000  # more than a screen can show
TAIL_BYTES = 256 << 10  # of a CSV file, read without sampling
MOST_ROWS = 20_000  # kept; beyond it half of the older rows are dropped

Row = TypeVar("Row")


class GrowingFiles:
    """The heartbeats and CSV rows of the runs that one monitor shows."""

    def __init__(self) -> None:
        self._beats: dict[Path, _RecentBeats] = {}
        self._rows: dict[Path, _SampledRows[Any]] = {}

    def beats(self, directory: RunDirectory) -> dict[int, list[Heartbeat]]:
        """The newest heartbeats of each rank, oldest first."""
        files = directory.heartbeats()
        for rank, path in files.items():
            if path not in self._beats:
                self._beats[path] = _RecentBeats(path, BEATS_OF_OTHERS if rank else BEATS_OF_RANK_0)
        return {rank: self._beats[path].read() for rank, path in files.items()}

    def rows(self, path: Path, columns: int) -> list[list[float]]:
        """Rows of numbers of a CSV file: a sample of the older ones, and all of the newest."""
        return self._rows.setdefault(path, _SampledRows(path, lambda line: parse_row(line, columns))).read()

    def usage(self, directory: RunDirectory) -> list[UsageSample]:
        """The same of gpu_usage.csv."""
        path = usage_csv(directory)
        return self._rows.setdefault(path, _SampledRows(path, parse_usage)).read()


class _RecentBeats:
    def __init__(self, path: Path, most: int) -> None:
        self._follower = HeartbeatFollower(path, last_bytes=most * BYTES_PER_BEAT)
        self._beats = deque(read_heartbeats(previous_file(path), tail=most), maxlen=most)

    def read(self) -> list[Heartbeat]:
        while fresh := self._follower.poll():
            self._beats.extend(fresh)
        return list(self._beats)


class _SampledRows(Generic[Row]):
    def __init__(self, path: Path, parse: Callable[[bytes], Row | None]) -> None:
        self._path, self._parse = path, parse
        self._rows: list[Row] = []
        self._inode = self._offset = 0

    def read(self) -> list[Row]:
        try:
            with open_to_read(self._path) as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or not self._offset <= state.st_size <= self._offset + TAIL_BYTES:
                    lines, self._rows = sample_lines(file, SAMPLED_ROWS, TAIL_BYTES), []
                    self._inode, self._offset = state.st_ino, file.tell()
                else:
                    lines, self._offset = lines_after(file, self._offset, TAIL_BYTES)
        except OSError:
            return []
        self._rows += [row for line in lines if (row := self._parse(line)) is not None]
        if len(self._rows) > MOST_ROWS:
            half = MOST_ROWS // 2
            older, newer = self._rows[:-half], self._rows[-half:]
            # At random, because rows of several GPUs take turns.
            kept = sorted(random.Random(0).sample(range(len(older)), len(older) // 2))
            self._rows = [older[i] for i in kept] + newer
        return self._rows
