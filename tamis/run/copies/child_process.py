"""The copying child process from its parent's side: start it with a launch, restart it, wait for the last copy."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tamis.config.schema import Copy
from tamis.run.background import repeated
from tamis.run.copies.copier import CopyRefused
from tamis.run.copies.state import read_copies
from tamis.run.files.console import say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.reading import parse_json_line

FIRST_ANSWER_S = 60.0  # an SSH connection and the import of a store's package
LOOK_EVERY_S = 10.0
AFTER_TERM_S = 25.0  # for the last copy: the machine may be taken away


def run_with_copies(copy: Copy, run: RunDirectory, work: Callable[[], int]) -> int:
    """Do the work of a launch while its checkpoints go to `copy.to`, then wait for the last copy; the work's code.

    Raises CopyRefused before the work begins if the place belongs to another run, or if nothing can be written there
    and the run has no checkpoint yet. Later failures are recorded and tried again, and never end a run.
    """
    if copy.to is None:
        return work()
    process = CopyProcess(copy, run)
    patience_s = 0.0
    try:
        process.start()
        with repeated(LOOK_EVERY_S, process.restart_if_dead):
            code = work()
        patience_s = min(AFTER_TERM_S, copy.wait_s) if code == ExitCode.PREEMPTED else copy.wait_s
        return code
    finally:
        process.finish(patience_s)


def is_copied(run: RunDirectory) -> bool:
    """True if the newest checkpoint is copied and verified, so that the machine may go."""
    state, newest = read_copies(run), max(run.checkpoints(), default=None)
    return state is not None and newest is not None and state.newest_step == newest


class CopyProcess:
    """Starts and ends `upload_loop`."""

    def __init__(self, copy: Copy, run: RunDirectory) -> None:
        self.copy, self.run = copy, run
        self._process: subprocess.Popen[bytes] | None = None
        self._is_refused = False

    def start(self) -> None:
        """Start the process and wait for its first answer. Raises CopyRefused."""
        say("copy.to: looking at what is there …")
        self._process = self._popen()
        answer = self._first_answer(self._process)
        state, reason = str(answer.get("state")), str(answer.get("reason"))
        if state == "refused" or (state != "ready" and not self.run.checkpoints()):
            raise CopyRefused(f"copy.to is {self.copy.to}: {reason}. Nothing was started")
        warning = "" if state == "ready" else "NOTHING IS COPIED for now, and it is tried again: "
        say(f"copy.to: {warning}{reason}")

    def restart_if_dead(self) -> None:
        """Start it again after a crash; a refusal is final."""
        if self._process is not None and self._process.poll() not in (None, ExitCode.USAGE):
            self._process = self._popen()

    def finish(self, patience_s: float) -> None:
        """Ask for the last copies, wait at most so long, and print whether the newest checkpoint is copied."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        began = time.monotonic()
        if patience_s:
            with repeated(LOOK_EVERY_S, lambda: say(f"copying what is left, {time.monotonic() - began:.0f} s so far")):
                _wait(process, patience_s)
            self._say_result()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the rsync that it may have started
        process.wait()
        process.stdout.close()

    def _say_result(self) -> None:
        if is_copied(self.run):
            say(f"copied: step {max(self.run.checkpoints())} is the newest copy, and verified")
        elif self.run.checkpoints():
            say(
                "NOT COPIED: the newest checkpoint is on this machine alone (OUT/copies.json has the reason). Start "
                "the same command again to copy it"
            )

    def _popen(self) -> subprocess.Popen[bytes]:
        assert self.copy.to is not None
        command = ["nice", sys.executable, "-m", "tamis.run.copies.upload_loop", str(self.run.path), self.copy.to]
        command += ["--keep", str(self.copy.keep)]
        command += [] if self.copy.max_mbps is None else ["--max-mbps", str(self.copy.max_mbps)]
        # A session of its own: Ctrl-C ends the training, and the last copy comes after it.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    @staticmethod
    def _first_answer(process: subprocess.Popen[bytes]) -> dict[str, object]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], FIRST_ANSWER_S)[0]:
            return {"state": "failing", "reason": f"no answer within {FIRST_ANSWER_S:.0f} s"}
        return parse_json_line(process.stdout.readline()) or {"state": "failing", "reason": "the copying process ended"}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
