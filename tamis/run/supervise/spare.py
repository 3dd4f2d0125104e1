"""The spare worker: a process that has imported torch and waits, so that a restart takes a second instead of several.

Only for a run of one process. A spare that died, was stopped, or was started with other code or another environment is
not used, and the worker starts as usual.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tamis
from tamis.run.files.lock import ProcessId
from tamis.run.supervise.worker_processes import Screen, WorkerProcesses, worker_environment

PRELOAD = "tamis.run.worker.preload"


class SpareWorker:
    """At most one process that can become the next worker, and what it was started with."""

    def __init__(self, log: Path, screens: tuple[Screen, Screen]) -> None:
        self.log, self.screens = log, screens
        self._workers: WorkerProcesses | None = None
        self._started_with: dict[str, Any] = {}

    def start(self, command: Sequence[str]) -> None:
        """Start the process for workers like `command`, `python … -m MODULE ARGUMENTS`; one that died is left so."""
        if self._workers is not None:
            return
        self._started_with = _started_with(command)
        program, module, _ = _split(command)
        with contextlib.suppress(OSError):  # no memory, too many processes: the run goes on without
            self._workers = WorkerProcesses([*program, PRELOAD, module], self.log, self.screens, stdin=subprocess.PIPE)

    def take(self, command: Sequence[str]) -> WorkerProcesses | None:
        """Hand the arguments to the process, which is the worker from then on; None if it cannot be used."""
        if self._workers is None:
            return None
        if self._is_usable(command) and _give(self._workers, _split(command)[2]):
            workers, self._workers = self._workers, None
            return workers
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        if self._workers is not None:
            self._workers.send(signal.SIGKILL)
            self._workers.close()
            self._workers = None

    def _is_usable(self, command: Sequence[str]) -> bool:
        assert self._workers is not None
        state = ProcessId.of(self._workers.process.pid).state()
        return state == "running" and self._started_with == _started_with(command)


def _started_with(command: Sequence[str]) -> dict[str, Any]:
    """What must be the same when the process is used: interpreter, module, environment, and the code on disk."""
    program, module, _ = _split(command)
    code = [*Path(tamis.__file__).parent.rglob("*.py"), Path(sysconfig.get_path("purelib"))]  # pip changes the folder
    return {
        "program": program,
        "module": module,
        "environment": worker_environment(),
        "code": {str(path): _modified(path) for path in code},
    }


def _modified(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # removed in this moment
        return path.stat().st_mtime_ns
    return None


def _split(command: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The interpreter with its options, the module that it runs, and the module's arguments."""
    after = list(command).index("-m") + 1
    return list(command[:after]), command[after], list(command[after + 1 :])


def _give(workers: WorkerProcesses, arguments: list[str]) -> bool:
    """Write the arguments to the process; False when it is gone."""
    assert workers.process.stdin is not None
    with contextlib.suppress(OSError):
        workers.process.stdin.write(json.dumps(arguments).encode() + b"\n")
        workers.process.stdin.close()
        return True
    return False
