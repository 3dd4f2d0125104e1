"""After the end of a launch: run cost.on_end once, and remind the operator of a machine that still costs money."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import FrameType

from tamis.config import Config
from tamis.run.background import signals_handled
from tamis.run.copies.child_process import is_copied
from tamis.run.cost import money
from tamis.run.eta import duration_text
from tamis.run.files.console import say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, read_events
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.lock import RunLock
from tamis.run.files.reading import open_to_append
from tamis.run.files.records import utc
from tamis.run.notify.notifier import Notifier

LOOK_EVERY_S = 0.5
ON_END_TIMEOUT_S = 600.0
WITHOUT_ON_END = (ExitCode.USAGE, ExitCode.PREEMPTED)  # nothing ran; the sender of the signal decides


class AfterEnd:
    """What follows the end of one launch. A signal or a new launch in the same directory ends it."""

    def __init__(self, config: Config, out: RunDirectory, notifier: Notifier, since: float) -> None:
        self.config, self.out, self.notifier, self.since = config, out, notifier, since
        self.events = EventLog(out, by="launch", say=say)
        self._stop = threading.Event()

    def run(self, code: int) -> None:
        if code in WITHOUT_ON_END or not self._has_trained():
            return
        stops = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self._on_stop)
        with signals_handled({**stops, signal.SIGHUP: signal.SIG_IGN}):
            if self.config.cost.on_end:
                self._run_on_end_after_grace()
            if self.config.notify.idle_hours:
                self._remind()

    def _has_trained(self) -> bool:
        """True if this launch came as far as its first phase or worker."""
        own = (event for event in read_events(self.out, 100) if event["by"] != "notify")
        return any(event["ts"] >= self.since for event in own)

    def _run_on_end_after_grace(self) -> None:
        grace_s, keep = self.config.cost.grace_s, HaltFile(self.out.keep)
        say(f"cost.on_end runs in {duration_text(grace_s)}; touch {self.out.keep} cancels it")
        self._wait(grace_s, lambda: keep.requested(self.since))
        if keep.requested(self.since):
            self.events.record("kept", f"{self.out.keep} cancels cost.on_end")
        elif self._stop.is_set() or self._is_launched_again():
            self.events.record("kept", "a signal or another launch cancels cost.on_end")
        elif self.config.copy.to and not is_copied(self.out):
            reason = "the newest checkpoint is not copied to copy.to, and would be lost with the machine"
            self.events.record("on_end_failed", f"cost.on_end does not run: {reason}; {self._still_costs()}")
        else:
            self.notifier.flush()
            self._run_on_end()

    def _run_on_end(self) -> None:
        command = self.config.cost.on_end
        try:
            with open_to_append(self.out.path / "on_end.log") as log:
                log.write(f"{utc()} {command[0]}\n".encode())
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=ON_END_TIMEOUT_S
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = (
                f"did not end within {ON_END_TIMEOUT_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else error
            )
            self.events.record("on_end_failed", f"cost.on_end ({command[0]}): {reason}; {self._still_costs()}")
            return
        if done.returncode:
            failure = f"cost.on_end ({command[0]}) ended with exit code {done.returncode}"
            self.events.record("on_end_failed", f"{failure}; {self._still_costs()}", exit_code=done.returncode)
        else:
            self.events.record("on_end", f"cost.on_end ({command[0]}) ended with exit code 0")

    def _still_costs(self) -> str:
        price = self.config.cost.per_hour
        return f"the machine still costs {money(price)} an hour" if price else "the machine still costs money"

    def _remind(self) -> None:
        """Send a reminder every notify.idle_hours until a signal or another launch."""
        every_s, ended = self.config.notify.idle_hours * 3600, time.monotonic()
        say(f"reminders follow every {duration_text(every_s)}; Ctrl-C or a new launch ends them")
        while not self._wait(every_s):
            ago = duration_text(time.monotonic() - ended)
            self.notifier.tell("idle", f"ended {ago} ago; {self._still_costs()}", about=f"idle {time.monotonic()}")

    def _wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait; true if something ended the wait."""
        deadline = time.monotonic() + seconds
        while not (self._stop.is_set() or self._is_launched_again() or is_over()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._stop.wait(min(LOOK_EVERY_S, left))
        return True

    def _is_launched_again(self) -> bool:
        return any(RunLock(lock).is_held() for lock in (self.out.lock, self.out.launch_lock, self.out.trainer_lock))

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()
