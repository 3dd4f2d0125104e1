"""One trainer per run directory: a lock file that names its owner, and process identities that outlive a reused pid."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import open_regular, read_json

ProcessState = Literal["running", "stopped", "dead", "unknown"]

ATTEMPTS, BETWEEN_ATTEMPTS_S = 10, 0.05  # to take the lock; `is_held` of another process shares it for an instant


@functools.cache
def this_host() -> str:
    """A hash that differs between machines, boots and containers: pids compare only within it. It names no host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        boot = namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot} {namespace}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class ProcessId:
    """A pid with the process's start time, so that a later process with the same pid is not taken for it."""

    pid: int
    started: int  # clock ticks since boot; 0: a process that was never seen on this host

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now; start time 0 when there is none."""
        return cls(pid, _state_and_start(pid)[1])

    @classmethod
    def recorded(cls, pid: int, started: int | None, host: str | None) -> ProcessId:
        """The process that a file names. One of another host has start time 0, and is never signalled."""
        if host is None or started is None:  # a file of an earlier version
            return cls.of(pid)
        return cls(pid, started if host == this_host() else 0)

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
        """Signal the process if it is still the same one. One that is stopped is continued, so that it obeys TERM."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
                if number == signal.SIGTERM:
                    os.kill(self.pid, signal.SIGCONT)


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
    """Refuse early, before anything is written next to a run that is under way; `acquire` is what decides."""
    for lock in (RunLock(run.lock), RunLock(run.launch_lock)):
        if lock.is_held():
            raise RunLocked(lock.refusal())


def require_no_trainer(run: RunDirectory) -> None:
    """Refuse while a supervisor runs here, or a trainer that no supervisor started.

    Workers whose supervisor was killed do not count: its name still stands in the lock, and the next one ends them.
    """
    supervisor, trainer = RunLock(run.lock), RunLock(run.trainer_lock)
    if supervisor.is_held():
        raise RunLocked(supervisor.refusal())
    if supervisor.owner() is None and trainer.is_held():
        raise RunLocked(trainer.refusal())


class RunLock:
    """Held while a process owns the run directory. The kernel releases it when the owner ends, however it ends."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)  # RunDirectory.lock
        self._descriptor: int | None = None

    def acquire(self, purpose: str, check: Callable[[], object] = lambda: None) -> None:
        """Take the lock, or raise RunLocked. `check` may refuse: it runs before a byte changes, and under the lock."""
        check()
        descriptor = _open_lock(self.path)
        try:
            _lock(descriptor)
            check()
        except BlockingIOError:
            os.close(descriptor)
            raise RunLocked(self.refusal()) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.sign(purpose)

    def sign(self, purpose: str) -> None:
        """Record this process as the owner, and what it does."""
        assert self._descriptor is not None
        me = ProcessId.of(os.getpid())
        owner = {
            "pid": me.pid,
            "started": me.started,
            "host": this_host(),
            "host_name": socket.gethostname(),  # for the refusal; a released lock is empty, and no lock leaves OUT
            "purpose": purpose,
            "since": time.time(),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode() + b"\n", 0)

    def release(self) -> None:
        """Release the lock. The file stays: without it, two processes could lock two files of the same name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool:
        """True if any process holds the lock, this one included."""
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
        """The process that holds the lock, or held it when it was killed; None when it was released."""
        try:
            owner = read_json(self.path)
        except (OSError, ValueError):
            return None
        return owner if isinstance(owner, dict) else None

    def owner_process(self) -> ProcessId | None:
        """The owner as a process that can be signalled if it is on this host; None when there is no owner."""
        owner = self.owner() or {}
        pid, started, host = owner.get("pid"), owner.get("started"), owner.get("host")
        if not isinstance(pid, int) or not isinstance(started, int) or not isinstance(host, str):
            return None
        return ProcessId.recorded(pid, started, host)

    def refusal(self) -> str:
        owner = self.owner() or {}
        return (
            f"{self.path.parent} belongs to a running {owner.get('purpose', 'process')} "
            f"(pid {owner.get('pid', 'unknown')} on {owner.get('host_name', 'this machine')}). "
            f"Halt it first (touch {self.path.parent / '.HALT'}), or choose another train.out_dir."
        )

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _open_lock(path: Path) -> int:
    """Open or create the lock file; never through a link, because signing it would overwrite the link's target."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise OSError(error.errno, f"{path} is not a lock file but a link or a folder: remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path} is not a regular file: remove it")
    return descriptor


def _lock(descriptor: int) -> None:
    """Lock the file; BlockingIOError when another process holds it."""
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt + 1 == ATTEMPTS:
                raise
            time.sleep(BETWEEN_ATTEMPTS_S)
