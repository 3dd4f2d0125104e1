"""The process that copies a run while it trains: `python -m tamis.run.copies.upload_loop OUT URL`, started by a launch.

It looks for new checkpoints, copies the newest first, and retries what fails. When its standard input closes, because
the run has ended or the supervisor has died, it copies what is left and exits. OUT/copies.json has its state.
"""

from __future__ import annotations

import argparse
import json
import math
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tamis.config import ConfigError
from tamis.run.copies.copier import Copier, CopyRefused, SourceGone
from tamis.run.copies.state import CopiesState, write_copies
from tamis.run.copies.store import StoreError, Transfer, TransferCancelled, open_store
from tamis.run.files.console import printable, say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.lock import RunLock, RunLocked

LOOK_EVERY_S = 2.0
LOOK_DURING_UPLOAD_S = 0.5
RECORDS_EVERY_S = 60.0
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 300.0  # between attempts after failures
LAST_ATTEMPTS = 3  # once the run has ended

FirstState = Literal["ready", "failing", "refused"]


class UploadLoop:
    """One copying process from its start to its exit."""

    def __init__(self, run: RunDirectory, url: str, keep: int, max_mbps: float | None) -> None:
        self.run = run
        self.events = EventLog(run, by="copier", say=lambda text: say(text, sys.stderr))
        self.copier = Copier(run, open_store(url), keep, Transfer(max_mbps, self._is_superseded))
        self.is_finishing = self.is_claimed = False
        self.current: int | None = None  # the step that is being uploaded
        self.problem: str | None = None
        self.last_success: float | None = None
        # On the Hugging Face hub every file is a commit, and commits are rationed: records go with a checkpoint only.
        self.records_every_s = math.inf if url.startswith("hf://") else RECORDS_EVERY_S
        self.records_at = self.looked_at = 0.0  # monotonic

    def run_to_its_end(self) -> int:
        """Copy until everything is copied after the run has ended; returns 0, or why not."""
        failures = 0
        while self.run.is_still_held():
            if not self.is_finishing and self._is_asked_to_finish():
                self.is_finishing, failures = True, 0
            try:
                is_idle = self._copy_next()
            except CopyRefused as error:
                self._fail(error)
                return ExitCode.USAGE
            except StoreError as error:
                failures += 1
                self._fail(error)
                if self.is_finishing and failures >= LAST_ATTEMPTS:
                    return ExitCode.CRASH
                self._wait(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (failures - 1)))
                continue
            failures = 0
            if is_idle and self.is_finishing:
                return ExitCode.DONE
            if is_idle:
                self._wait(LOOK_EVERY_S)
        return ExitCode.CRASH

    def first_state(self) -> tuple[FirstState, str]:
        """Claim the place, and tell the parent whether it can be used."""
        try:
            self._claim()
        except CopyRefused as error:
            return "refused", str(error)
        except StoreError as error:
            self._fail(error)
            return "failing", str(error)
        newest = self.copier.newest()
        return "ready", "it holds no copy yet" if newest is None else f"its newest copy is of step {newest}"

    def _claim(self) -> None:
        if not self.is_claimed:
            self.copier.claim()
            self.is_claimed = True
            self._write_state()

    def _copy_next(self) -> bool:
        """Copy the newest checkpoint that is missing there, or else the records; returns True if no checkpoint is."""
        self._claim()
        steps = self.copier.pending()
        if steps:
            with suppress(TransferCancelled):
                self._copy_step(steps[0])
        if steps or self.is_finishing or time.monotonic() - self.records_at > self.records_every_s:
            self.copier.copy_records()
            self.records_at = time.monotonic()
            self._succeed()
        return not steps

    def _copy_step(self, step: int) -> None:
        self.current = step
        self._write_state()
        began = time.monotonic()
        try:
            self.copier.copy_step(step)
        except SourceGone as gone:
            self.events.record("copy_skipped", str(gone), step=step)
            return
        finally:
            self.current = None
        self.events.record("copied", f"checkpoint of step {step}, in {time.monotonic() - began:.1f} s", step=step)
        self._succeed()
        self.copier.retire()

    def _succeed(self) -> None:
        if self.problem is not None:
            self.events.record("copy_recovered", "copies can be made again")
        self.problem, self.last_success = None, time.time()
        self._write_state()

    def _fail(self, error: Exception) -> None:
        """Record a problem once; it stays in copies.json while it lasts."""
        if self.problem is None:
            self.events.record("copy_failed", f"{error}. Training continues, and copies are tried again")
        self.problem = str(error)
        self._write_state()

    def _write_state(self) -> None:
        copier = self.copier
        state = CopiesState(copier.newest(), sorted(copier.copies), self.current, self.last_success, self.problem)
        write_copies(self.run, state)

    def _is_superseded(self) -> bool:
        """True if the run has stopped and has a newer checkpoint than the one that is being uploaded."""
        if time.monotonic() - self.looked_at < LOOK_DURING_UPLOAD_S:
            return False
        self.looked_at = time.monotonic()
        newest = max(self.run.checkpoints(), default=0)
        is_older = newest > (self.current or newest) and newest not in self.copier.copies
        return is_older and (self._is_asked_to_finish() or self._has_stopped())

    def _has_stopped(self) -> bool:
        """True if the trainer has ended, with its last checkpoint saved; the launch may still write its report."""
        last = read_heartbeats(self.run.heartbeat(0), tail=1)
        return bool(last) and last[-1].phase in ("halted", "done", "failed")

    def _is_asked_to_finish(self) -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    def _wait(self, seconds: float) -> None:
        """Wait; the end of the run shortens it."""
        if self.is_finishing:
            time.sleep(min(seconds, FIRST_DELAY_S))
        else:
            select.select([sys.stdin], [], [], seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tamis.run.copies.upload_loop")
    parser.add_argument("out", type=Path)
    parser.add_argument("url")
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("--max-mbps", type=float)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to a whole group; the supervisor decides when copies end
    run = RunDirectory(arguments.out)
    run.hold()
    with RunLock(run.copy_lock) as lock:
        _acquire(lock)
        try:
            loop = UploadLoop(run, arguments.url, arguments.keep, arguments.max_mbps)
        except ConfigError as error:  # a package is missing
            _tell("refused", str(error))
            return ExitCode.USAGE
        state, reason = loop.first_state()
        _tell(state, reason)
        return ExitCode.USAGE if state == "refused" else loop.run_to_its_end()


def _acquire(lock: RunLock) -> None:
    """Take the lock; the process of a supervisor that died may still be copying its last checkpoint."""
    while True:
        try:
            return lock.acquire("copy")
        except RunLocked:
            time.sleep(LOOK_EVERY_S)


def _tell(state: FirstState, reason: str) -> None:
    """Write the one line that the parent waits for."""
    with suppress(OSError):
        print(json.dumps({"state": state, "reason": printable(reason)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
