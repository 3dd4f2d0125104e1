"""Follows the events of a launch and sends messages about them, in threads of the supervisor."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tamis.config import Config, ConfigError
from tamis.config.addresses import address, is_shown_form, shown_address
from tamis.run.background import repeated
from tamis.run.cost import CostMeter
from tamis.run.files.console import say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, parse_event
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.reading import lines_after, open_to_read
from tamis.run.handover.redaction import redactor
from tamis.run.notify.delivery import Outbox, require_usable, send
from tamis.run.notify.messages import compose, sent_at_end, sent_for
from tamis.run.supervise.escalation import wait_until

VARIABLE = "TAMIS_NOTIFY"
LOOK_EVERY_S = 1.0
FLUSH_S = 5.0  # longest wait for the last messages …
SHORT_FLUSH_S = 2.0  # … and after a signal, when the machine may go away
REPEAT_S = 600.0  # a message of the same kind comes again after this time at the earliest
MOST_PER_HOUR = 30
MOST_BYTES_PER_LOOK = 1 << 20
NOT_SENT = ("notify_failed", "cost_limit")  # our own problem; the end follows


def addresses_for(config: Config, environment: Mapping[str, str]) -> list[str]:
    """The addresses of notify.to and TAMIS_NOTIFY; a ConfigError when one cannot be used."""
    found = [word for word in re.split(r"[\s,]+", environment.get(VARIABLE, "")) if word]
    for word in found:
        try:
            address(word)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from None
    usable = []
    for one in dict.fromkeys([*config.notify.addresses, *found]):
        if is_shown_form(one):
            say(f"no messages to {one}: a stored configuration lacks the secret part; set {VARIABLE} or notify.to")
            continue
        require_usable(one)
        usable.append(one)
    return usable


class Notifier:
    """The messages of one launch. Nothing here waits for a service."""

    def __init__(self, config: Config, out: RunDirectory, meter: CostMeter, addresses: list[str]) -> None:
        self.config, self.out, self.meter = config, out, meter
        self.ended_as: str | None = None  # the event of the message about the end
        self._events = EventLog(out, by="notify")
        self._outboxes = [Outbox(one, self._report) for one in addresses]
        self._redact = redactor(os.environ)
        earlier = [path for path in (out.events, self._phase_events()) if path is not None and path.is_file()]
        self._offsets = {path: path.stat().st_size for path in earlier}
        self._step_at_launch, self._has_saved = max(out.checkpoints(), default=0), False
        self._digest_s = config.notify.digest_hours * 3600
        self._next_digest = time.monotonic() + self._digest_s
        self._has_started = False
        self._sent: dict[str, float] = {}  # what a message was about → when
        self._times: list[float] = []  # of the messages of the last hour
        self._held_back: Counter[str] = Counter()
        self._since_digest: Counter[str] = Counter()
        self._looking = threading.Lock()  # the launch looks too, at its end

    def look(self) -> None:
        """Send what the new events, the first checkpoint and the time call for."""
        if not self._outboxes:
            return
        with self._looking, _harmless():
            self._look()

    def _look(self) -> None:
        for event in self._new_events():
            self._send_event(event)
        if not self._has_saved and (newest := max(self.out.checkpoints(), default=0)) > self._step_at_launch:
            self._has_saved = True
            self.tell("first_checkpoint", f"{self.out.checkpoint(newest).name} is the first checkpoint of this launch")
        if self._digest_s and time.monotonic() >= self._next_digest and self.ended_as is None:
            self._next_digest = time.monotonic() + self._digest_s
            happened = _counts(self._since_digest) or "nothing to report"
            self._since_digest.clear()
            hours = f"{self.config.notify.digest_hours:g}"
            self.tell("digest", f"the last {hours} hours: {happened}", about=f"digest {self._next_digest}")

    def tell(self, event: str, reason: str, *, about: str | None = None, is_final: bool = False) -> None:
        """Queue a message, unless one about the same came a short time ago or there were too many."""
        if not self._outboxes or not (is_final or self._may_send(event, about or event)):
            return
        if self._held_back and is_final:
            reason += f" (not sent one by one: {_counts(self._held_back)})"
        with _harmless():
            message = compose(
                event,
                self._redact(reason),
                self.config,
                self.out,
                self.meter,
                is_final=is_final,
                is_running=self.ended_as is None,
            )
            for outbox in self._outboxes:
                outbox.put(message)

    def end(self, code: int, reason: str | None = None) -> None:
        """Send how the launch ended, if no event did: it failed before or after the supervised run."""
        self.look()
        if self.ended_as is None and (code != ExitCode.DONE or self._has_started):
            self.ended_as = sent_at_end(code)
            self.tell(self.ended_as, reason or f"the launch ended with exit code {code}", is_final=True)

    def flush(self) -> None:
        """Wait a few seconds until every message so far is sent."""
        self.look()
        wait_until(lambda: all(outbox.is_empty for outbox in self._outboxes), FLUSH_S)

    def close(self) -> None:
        """Wait a few seconds for the last messages."""
        deadline = time.monotonic() + (SHORT_FLUSH_S if self.ended_as == "preempted" else FLUSH_S)
        for outbox in self._outboxes:
            outbox.close()
        for outbox in self._outboxes:
            outbox.join(deadline - time.monotonic())

    def _send_event(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        kind = None if name in NOT_SENT else sent_for(event)
        if kind is None or (name == "start" and self._has_started):  # after a restart, which was sent
            return
        self._has_started |= name == "start"
        self.ended_as = kind if name == "end" else self.ended_as
        self._since_digest[kind] += 1
        about = f"{name} {event['evidence'].get('phase', '')}"
        self.tell(kind, event["reason"], about=about, is_final=name == "end")

    def _may_send(self, event: str, about: str) -> bool:
        now = time.monotonic()
        self._times = [then for then in self._times if now - then < 3600]
        if now - self._sent.get(about, -REPEAT_S) < REPEAT_S or len(self._times) >= MOST_PER_HOUR:
            self._held_back[event] += 1
            return False
        self._sent[about] = now
        self._times.append(now)
        return True

    def _new_events(self) -> list[dict[str, Any]]:
        """New events of the run; of a phase in a directory of its own, all but its start and end."""
        events = self._read_new(self.out.events)
        if (of_phase := self._phase_events()) is not None:
            events += [event for event in self._read_new(of_phase) if event["event"] not in ("start", "end")]
        return events

    def _phase_events(self) -> Path | None:
        """The events file of the phase under way; None while there is no phase, or it runs in OUT."""
        phase = (self.out.path / "phases" / "current").resolve()
        return phase / "events.jsonl" if phase.is_dir() and phase != self.out.path.resolve() else None

    def _read_new(self, path: Path) -> list[dict[str, Any]]:
        try:
            with open_to_read(path) as file:
                lines, self._offsets[path] = lines_after(file, self._offsets.get(path, 0), MOST_BYTES_PER_LOOK)
        except OSError:
            return []
        return [event for line in lines if (event := parse_event(line)) is not None]

    def _report(self, problem: str) -> None:
        if self.out.is_still_held():
            self._events.record("notify_failed", f"{problem}; trying again for a while")


@contextmanager
def _harmless() -> Iterator[None]:
    """Report any error and continue: a message must never fail a run."""
    try:
        yield
    except Exception as error:
        say(f"a message could not be written ({type(error).__name__}: {error}); the run continues")


def _counts(kinds: Counter[str]) -> str:
    """`restart × 2, stall × 1`."""
    return ", ".join(f"{name} × {count}" for name, count in sorted(kinds.items()))


@contextmanager
def notified(config: Config, out: RunDirectory, meter: CostMeter, addresses: list[str]) -> Iterator[Notifier]:
    """Send messages about what happens in OUT while the block runs, and how it ended if it raised an error."""
    notifier = Notifier(config, out, meter, addresses)
    for one in addresses:
        say(f"messages go to {shown_address(one)}")
    try:
        with repeated(LOOK_EVERY_S, notifier.look):
            yield notifier
    except Exception as error:
        notifier.end(ExitCode.CRASH, f"the launch failed: {error}")
        raise
    finally:
        notifier.look()
        notifier.close()


def send_test(config: Config) -> int:
    """Send a test message to every address and print each result; returns 1 if one did not accept it."""
    addresses = addresses_for(config, os.environ)
    if not addresses:
        raise ConfigError(f"there is no address: set notify.to=https://…, or {VARIABLE}")
    out = RunDirectory(config.train.out_dir)
    message = compose("test", "a test message from tamis notify test", config, out, CostMeter(config, out))
    problems = [send(one, message) for one in addresses]
    for one, problem in zip(addresses, problems, strict=True):
        say(f"{shown_address(one)}: {'sent' if problem is None else problem.text}")
    return 1 if any(problems) else 0
