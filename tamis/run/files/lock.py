"""One trainer per run directory: a lock file with its owner, and process identities that a reused pid cannot fake."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import open_regular, read_json

ProcessState = Literal["running", "stopped", "dead", "unknown"]

ATTEMPTS, BETWEEN_ATTEMPTS_S = 10, 0.05  # to lock, before another owner is believed


@dataclass(frozen=True)
class ProcessId:
    """A pid with the process's start time, so that a later process with the same pid is not taken for it."""

    pid: int
    started: int  # clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now; start time 0 when there is none."""
        return cls(pid, _state_and_start(pid)[1])

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        pid, _, started = text.partition(":")
        return cls(int(pid), int(started)) if pid.isdecimal() and started.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    def is_alive(self) -> bool:
        return self.state() in ("running", "stopped")

    def state(self) -> ProcessState:
        """`unknown` when it was never seen here: a process of another machine or container."""
        if self.started == 0:
            return "unknown"
        letter, started = _state_and_start(self.pid)
        if started != self.started or letter in "ZX":  # a zombie has ended
            return "dead"
        return "stopped" if letter in "Tt" else "running"

    def send(self, number: int) -> None:
        """Signal the process if it is still the same one."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _state_and_start(pid: int) -> tuple[str, int]:
    """The kernel's letter for the process's state and its start time; ("X", 0) when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


class RunLocked(RuntimeError):
    """Another process owns the run directory."""


def require_no_launch(run: RunDirectory) -> None:
    """Refuse early, before anything is written into the directory of a live run; `acquire` decides."""
    for lock in (RunLock(run.lock), RunLock(run.launch_lock)):
        if lock.is_held():
            raise RunLocked(lock.refusal())


class RunLock:
    """Held while a process owns the run directory. The kernel frees it when the owner dies, however it dies."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)  # RunDirectory.lock
        self._descriptor: int | None = None

    def acquire(self, purpose: str) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for attempt in range(ATTEMPTS):  # a caller of `is_held` shares the lock for an instant
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt + 1 == ATTEMPTS:
                    os.close(descriptor)
                    raise RunLocked(self.refusal()) from None
                time.sleep(BETWEEN_ATTEMPTS_S)
        self._descriptor = descriptor
        self.sign(purpose)

    def sign(self, purpose: str) -> None:
        """Name this process as the owner; again after a fork, which shares the lock."""
        assert self._descriptor is not None
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "purpose": purpose, "since": time.time()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode() + b"\n", 0)

    def release(self) -> None:
        """Let go. The file stays: removing it would let two processes lock two files of the same name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool:
        """By any process, this one included."""
        if self._descriptor is not None:
            return True
        try:
            descriptor = open_regular(self.path)
        except OSError:  # there is none, or it is no file that a process could have locked
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def owner(self) -> dict[str, object] | None:
        """Who holds the lock, or held it when it died; None when it was released."""
        try:
            owner = read_json(self.path)
        except (OSError, ValueError):
            return None
        return owner if isinstance(owner, dict) else None

    def refusal(self) -> str:
        owner = self.owner() or {}
        return (
            f"{self.path.parent} belongs to a running {owner.get('purpose', 'process')} "
            f"(pid {owner.get('pid', 'unknown')} on {owner.get('host', 'this machine')}). "
            f"Halt it first (touch {self.path.parent / '.HALT'}), or choose another train.out_dir."
        )

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
