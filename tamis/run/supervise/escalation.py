"""Stops a run that an alarm was raised for: stack dumps, .HALT, TERM, KILL; each stage is recorded."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.halt import HaltFile
from tamis.run.files.lock import ProcessId
from tamis.run.limits import Grace
from tamis.run.worker.sidecar import write_stack_dump

BY_WATCHDOG = "watchdog: "  # first word of the reason in a .HALT that no person wrote
LOOK_EVERY_S = 0.1


class Escalation:
    """Stops the ranks of one run, each stage stronger than the one before."""

    def __init__(
        self, run: RunDirectory, ranks: Mapping[int, ProcessId], events: EventLog, *, grace: Grace | None = None
    ) -> None:
        self.run, self.ranks, self.events = run, dict(ranks), events
        self.grace = grace or Grace()

    def stop(
        self, reason: str, *, has_ended: Callable[[], bool], send: Callable[[int], None], dump: bool = True
    ) -> None:
        """Stop the run; `send` delivers a signal to all of it. Returns when it has ended, or KILL was sent."""
        if dump:
            self.dump_stacks()
        self.events.record("halt", f"{reason}; asking for a halt")
        self._continue_stopped()
        with contextlib.suppress(OSError):  # no space for a file: TERM needs none
            HaltFile(self.run.halt).request(BY_WATCHDOG + reason)
        if wait_until(has_ended, self.grace.halt_s):
            return
        self.events.record("term", f"no halt within {self.grace.halt_s:.0f} s; sending TERM")
        send(signal.SIGTERM)
        if wait_until(has_ended, self.grace.term_s):
            return
        self.events.record("kill", f"still running {self.grace.term_s:.0f} s after TERM; sending KILL")
        send(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Ask every rank for its stacks (USR1), and take them from outside where none are written."""
        before = set(self.run.stackdumps())
        for process in self.ranks.values():
            process.send(signal.SIGUSR1)
        wait_until(
            lambda: not any(self._can_answer(rank) for rank in self._without_dump(before)), seconds=self.grace.dump_s
        )
        for rank in self._without_dump(before):
            if self.ranks[rank].is_alive():
                with contextlib.suppress(OSError):
                    write_stack_dump(self.run, rank, self.ranks[rank].pid)
        written = sorted(path.name for path in set(self.run.stackdumps()) - before)
        self.events.record("stackdump", f"stacks of {len(written)} of {len(self.ranks)} ranks written", files=written)

    def _without_dump(self, before: set[Path]) -> list[int]:
        names = [path.name for path in set(self.run.stackdumps()) - before]
        return [rank for rank in self.ranks if not any(name.startswith(f"stackdump_rank{rank}_") for name in names)]

    def _can_answer(self, rank: int) -> bool:
        return self.ranks[rank].state() == "running"  # a stopped process receives its signals later

    def _continue_stopped(self) -> None:
        """Continue ranks that were only stopped: they can then obey the halt, and save."""
        for process in self.ranks.values():
            if process.state() == "stopped":
                process.send(signal.SIGCONT)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, at most so long; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(LOOK_EVERY_S, seconds))
    return True
