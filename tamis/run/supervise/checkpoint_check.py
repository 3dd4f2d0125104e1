"""The first checkpoint of a production run is loaded once, in a child process, while training goes on."""

from __future__ import annotations

import subprocess
import sys

from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog


class FirstCheckpointCheck:
    """Loads the first checkpoint as a resume would, and records whether it loads: 45,000 steps may depend on it."""

    def __init__(self, run: RunDirectory, config: Config, events: EventLog) -> None:
        self.run, self.config, self.events = run, config, events
        self._step = 0
        self._child: subprocess.Popen[str] | None = None
        self._is_done = not config.runtime.production or bool(run.checkpoints())

    def poll(self) -> None:
        """Start the child when the checkpoint is there, and record its result when it has ended. Never waits."""
        if self._is_done:
            return
        if self._child is None and (steps := self.run.checkpoints()):
            self._step = steps[0]
            self._child = self._start()
        if self._child is not None and self._child.poll() is not None:
            self._is_done = True
            self._record(self._child)

    def close(self) -> None:
        """End a child that still runs; only at the end of the launch."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.communicate()

    def _start(self) -> subprocess.Popen[str]:
        path = self.run.checkpoint(self._step)
        command = [sys.executable, "-m", "tamis", "verify-checkpoint", str(path), str(self.run.config_yaml)]
        return subprocess.Popen(
            ["nice", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _record(self, child: subprocess.Popen[str]) -> None:
        name = self.run.checkpoint(self._step).name
        said, _ = child.communicate()
        if child.returncode == 0:
            self.events.record("checkpoint_loads", f"{name} was loaded as a resume would", step=self._step)
        elif self._step in self.run.checkpoints():  # else retention removed it while it was being read
            last = (said.strip().splitlines() or ["no reason given"])[-1]
            self.events.record_alarm(Alarm("checkpoint_unloadable", "note", f"{name} does not load: {last[:300]}"))
