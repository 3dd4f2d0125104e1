"""The heartbeat: one line of JSON per rank, step and phase. One schema for its writer, watchdog, monitor and tests.

A line is one write() without fsync: it survives the process, and costs a few microseconds. Two files bound the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from tamis.run.files.lock import ProcessId, this_host
from tamis.run.files.reading import lines_after, open_regular, open_to_read, parse_json_line, read_last_lines
from tamis.run.files.records import is_time

Phase = Literal[
    "boot",  # the process runs, nothing is loaded
    "loader_ready",  # the data is open; the first fetch follows
    "compile",  # the model is being compiled or warmed up
    "step_start",  # a step begins; its batch is being fetched
    "progress",  # the batch is here; forward, backward and collectives run
    "step_end",  # the weights have moved
    "eval",  # validation runs; beaten for every batch
    "checkpoint",  # a checkpoint is being written
    "done",  # all steps are done
    "halted",  # stopped on request, checkpoint written
    "failed",  # stopped by an error, which detail names
]
PHASES: frozenset[str] = frozenset(get_args(Phase))
FINAL_PHASES = frozenset({"done", "halted", "failed"})
MAX_BYTES = 64 << 20  # per file; one older file of this size is kept too
MOST_BYTES_PER_POLL = 8 << 20  # a follower reads the rest at its next look


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One beat. Units are in the names; what was not measured is None."""

    ts: float  # wall clock, Unix seconds: for people
    mono: float  # monotonic clock, seconds: for durations within one process, whatever the wall clock does
    rank: int
    pid: int
    step: int  # the step the phase belongs to; 0 before the first
    phase: str
    loss: float | None = None
    lr: float | None = None
    toks_per_s: float | None = None  # of the whole group
    grad_norm: float | None = None  # before clipping
    dt_step_s: float | None = None
    dt_fetch_s: float | None = None  # how long this step waited for its batch
    dt_forward_s: float | None = None  # forward passes only: before any collective, so a slow rank shows here
    dt_fetch_p50_s: float | None = None
    dt_fetch_p95_s: float | None = None
    gpu_mem_alloc_gib: float | None = None
    gpu_mem_reserved_gib: float | None = None
    mfu: float | None = None  # share of the device's peak, 0 to 1
    gate_entropy_mean: float | None = None  # nats, over layers and heads; ln 3 = 1.0986: three equal gates
    gate_entropy_min: float | None = None
    gate_collapse_fraction: float | None = None  # share of heads where one branch takes nearly all
    gate_shares: list[list[float]] | None = None  # per layer: compressed, selected, window
    gate_entropy: list[float] | None = None  # per layer
    selection_distinct: list[float] | None = None  # per NSA layer: share of the older blocks that some query chose
    selection_distance: list[float] | None = None  # per NSA layer: how far back, 0 newest to 1 oldest
    selection_likeness: list[float] | None = None  # per NSA layer: neighbours' agreement, 0 random to 1 the same
    save_error: str | None = None  # with checkpoint: why this save failed; none when it succeeded
    exit_code: int | None = None  # with done, halted, failed: the code this rank exits with
    lasting: bool | None = None  # with failed: true when another try would end the same way
    detail: str | None = None  # a short word for people: which batch of the evaluation, which error
    started: int | None = None  # start time of the process, clock ticks since boot: its pid may be used again
    host: str | None = None  # of the process; a pid means nothing on another host

    @classmethod
    def from_line(cls, line: str | bytes) -> Heartbeat | None:
        """The beat of one line; None when the line was cut short or is not a beat."""
        values = parse_json_line(line) or {}
        try:
            known = {name: _restored(value) for name, value in values.items() if name in FIELDS}
        except RecursionError:
            return None
        return cls(**known) if _is_beat(known) else None

    @property
    def is_final(self) -> bool:
        return self.phase in FINAL_PHASES


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


TYPES: dict[str, Callable[[Any], bool]] = {  # recognise the values of each annotation
    "float": _is_number,
    "int": _is_count,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "list[float]": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "list[list[float]]": lambda value: isinstance(value, list) and all(map(TYPES["list[float]"], value)),
    "dict[str, float]": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "list[dict[str, float]]": lambda value: isinstance(value, list) and all(map(TYPES["dict[str, float]"], value)),
}
FIELDS = {field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(Heartbeat)}
OPTIONAL_FIELDS = frozenset(field.name for field in dataclasses.fields(Heartbeat) if field.default is None)


def _is_beat(values: dict[str, Any]) -> bool:
    """True if every field has its type and the clocks, the pid and the gates hold possible values."""
    for name, value in values.items():
        if not (TYPES[FIELDS[name]](value) or (value is None and name in OPTIONAL_FIELDS)):
            return False
    return (
        FIELDS.keys() - OPTIONAL_FIELDS <= values.keys()
        and values["phase"] in PHASES
        and values["pid"] > 0
        and is_time(values["ts"])
        and math.isfinite(values["mono"])
        and all(len(shares) == 3 for shares in values.get("gate_shares") or [])
    )


class HeartbeatWriter:
    """Appends the beats of one rank. Only the thread that made it may beat: a helper thread cannot fake progress."""

    def __init__(self, path: str | Path, rank: int, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = Path(path)
        self.rank = rank
        self.lost = 0  # beats that could not be written, on a full disk say
        self._max_bytes = max_bytes
        me = ProcessId.of(os.getpid())
        self._pid = me.pid
        self._origin = {"started": me.started, "host": this_host()}
        self._thread = threading.get_ident()
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        self._open()

    def beat(self, phase: Phase, step: int, **fields: Any) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a heartbeat must come from the thread that trains")
        if phase not in PHASES or not fields.keys() <= OPTIONAL_FIELDS:
            raise ValueError(f"not in the heartbeat schema: phase {phase!r}, fields {set(fields) - OPTIONAL_FIELDS}")
        record = {
            "ts": round(time.time(), 3),
            "mono": round(time.monotonic(), 4),
            "rank": self.rank,
            "pid": self._pid,
            "step": step,
            "phase": phase,
            **fields,
            **self._origin,
        }
        try:
            line = self._encode(record)
        except ValueError:  # JSON has no NaN: such numbers are written as words
            line = self._encode({name: _speakable(value) for name, value in record.items()})
        self._write(line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        if self._size + len(line) > self._max_bytes:
            self._rotate()
        try:
            written = os.write(self._descriptor, line)
        except OSError:  # a full disk must not end the training that would free it
            self.lost += 1
            return
        self._size += written
        if written < len(line):
            self.lost += 1
            self._finish_line()

    def _finish_line(self) -> None:
        """End a line the disk cut short, so that the next beat stands on its own."""
        try:
            self._size += os.write(self._descriptor, b"\n")
        except OSError:
            self._rotate()

    def _rotate(self) -> None:
        os.close(self._descriptor)
        os.replace(self.path, previous_file(self.path))
        self._open()

    def _open(self) -> None:
        self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._descriptor).st_size
        if self._size and not _ends_with_newline(self.path):
            self._finish_line()


def previous_file(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def read_heartbeats(path: str | Path, tail: int | None = None) -> list[Heartbeat]:
    """The beats of a file and of the one rotated away before it, oldest first; only the last `tail` if given.

    Lines cut short by a kill are passed over; no file is no beats.
    """
    path = Path(path)
    beats: list[Heartbeat] = []
    for part in (path, previous_file(path)):
        if tail is None or len(beats) < tail:
            beats = _beats_in(part, None if tail is None else tail - len(beats)) + beats
    return beats


def _beats_in(path: Path, tail: int | None) -> list[Heartbeat]:
    lines = read_last_lines(path, 2 * MAX_BYTES, tail)
    return [beat for beat in map(Heartbeat.from_line, lines) if beat is not None]


class HeartbeatFollower:
    """Returns the beats that were added to a file since the last look, through rotation and restarts.

    The first look begins `last_bytes` before the end, by default at the beginning.
    """

    def __init__(self, path: str | Path, last_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.problem: str | None = None  # why the file could not be read at the last look
        self._last_bytes = last_bytes
        self._inode = 0
        self._offset = 0

    def poll(self) -> list[Heartbeat]:
        fresh: list[bytes] = []
        self.problem = None
        try:
            with open_to_read(self.path) as file:
                self._begin_or_rotate(os.fstat(file.fileno()), fresh)
                fresh += self._lines_after(file, MOST_BYTES_PER_POLL)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.problem = str(error)
        return [beat for beat in map(Heartbeat.from_line, fresh) if beat is not None]

    def _begin_or_rotate(self, state: os.stat_result, fresh: list[bytes]) -> None:
        if not self._inode and self._last_bytes is not None:
            self._offset = max(0, state.st_size - self._last_bytes)
        if self._inode and state.st_ino != self._inode:  # rotated: finish the old file first
            with contextlib.suppress(OSError), open_to_read(previous_file(self.path)) as file:
                fresh += self._lines_after(file, MAX_BYTES)
            self._offset = 0
        self._inode = state.st_ino

    def _lines_after(self, file: IO[bytes], most: int) -> list[bytes]:
        if os.fstat(file.fileno()).st_size < self._offset:
            self._offset = 0
        lines, self._offset = lines_after(file, self._offset, most)
        return lines


def _ends_with_newline(path: Path) -> bool:
    with open_to_read(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _speakable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_speakable(item) for item in value] if isinstance(value, list) else value


def _restored(value: Any) -> Any:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return [_restored(item) for item in value] if isinstance(value, list) else value
