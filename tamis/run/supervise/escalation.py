"""How a run is stopped when something is wrong: stacks, then .HALT, then TERM, then KILL, and each rung recorded."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.halt import HaltFile
from tamis.run.files.lock import ProcessId
from tamis.run.worker.stackdump import write_stackdump

BY_WATCHDOG = "watchdog: "  # opens the reason in a .HALT that no person asked for
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Grace:
    """Seconds each rung is given before the next."""

    dump_s: float = 90.0  # reading the symbols of a large process takes py-spy a while
    halt_s: float = 30.0
    term_s: float = 27.0  # a worker leaves within 25 s of TERM


class Ladder:
    def __init__(
        self, run: RunDirectory, ranks: Mapping[int, ProcessId], events: EventLog, *, grace: Grace | None = None
    ) -> None:
        self.run, self.ranks, self.events = run, dict(ranks), events
        self.grace = grace or Grace()

    def climb(
        self, reason: str, *, has_ended: Callable[[], bool], send: Callable[[int], None], dump: bool = True
    ) -> None:
        """Stop the run; `send` delivers a signal to all of it. Returns when it has ended, or KILL was sent."""
        if dump:
            self.dump_stacks()
        self.events.record("halt", f"{reason}; asking for a halt")
        self._continue_stopped()
        with contextlib.suppress(OSError):  # no room for a file: the next rung needs none
            HaltFile(self.run.halt).request(BY_WATCHDOG + reason)
        if _within(self.grace.halt_s, has_ended):
            return
        self.events.record("term", f"no halt within {self.grace.halt_s:.0f} s; sending TERM")
        send(signal.SIGTERM)
        if _within(self.grace.term_s, has_ended):
            return
        self.events.record("kill", f"still there {self.grace.term_s:.0f} s after TERM; sending KILL")
        send(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Ask every rank for its stacks (USR1), and take them from outside where no answer comes."""
        before = set(self.run.stackdumps())
        for process in self.ranks.values():
            process.send(signal.SIGUSR1)
        _within(self.grace.dump_s, lambda: not any(self._will_answer(rank) for rank in self._without_dump(before)))
        for rank in self._without_dump(before):
            if self.ranks[rank].is_alive():
                with contextlib.suppress(OSError):
                    write_stackdump(self.run, rank, self.ranks[rank].pid)
        written = sorted(path.name for path in set(self.run.stackdumps()) - before)
        self.events.record("stackdump", f"stacks of {len(written)} of {len(self.ranks)} ranks written", files=written)

    def _without_dump(self, before: set[Path]) -> list[int]:
        names = [path.name for path in set(self.run.stackdumps()) - before]
        return [rank for rank in self.ranks if not any(name.startswith(f"stackdump_rank{rank}_") for name in names)]

    def _will_answer(self, rank: int) -> bool:
        return self.ranks[rank].state() == "running"  # a stopped process gets its signals later

    def _continue_stopped(self) -> None:
        """A rank that was only stopped can obey a halt, and save, once it is let go on."""
        for process in self.ranks.values():
            if process.state() == "stopped":
                process.send(signal.SIGCONT)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True
