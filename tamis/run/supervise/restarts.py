"""Whether a run that ended is started again: pure rules on its exit code, its progress and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tamis.run.files.events import Alarm
from tamis.run.files.exit_codes import ExitCode

NAMED = {code.value: code.name.lower().replace("_", " ") for code in ExitCode}
TELLING = (ExitCode.ANOMALY, ExitCode.DATA_FAILURE, ExitCode.USAGE)  # a rank that says this is the cause of the end


@dataclass(frozen=True)
class Ending:
    """How one attempt ended."""

    code: int
    furthest_step: int  # the last step any attempt has finished
    alarm: Alarm | None = None  # the watchdog stopped it for this
    term_sent: bool = False  # the supervisor was told to stop, and passed it on
    lasting: str | None = None  # what a rank said it failed of, when another try would end the same way


@dataclass(frozen=True)
class Verdict:
    restart: bool
    reason: str
    code: int = 0  # to exit with, when there is no restart
    delay_s: float = 0.0


@dataclass
class RestartBudget:
    """Remembers what the attempts of one launch achieved."""

    restarts: int = 10
    without_progress: int = 3  # restarts in a row that may end where the one before did
    first_delay_s: float = 2.0  # doubled with each restart without progress
    longest_delay_s: float = 300.0
    step_at_launch: int = 0
    used: int = field(default=0, init=False)
    fruitless: int = field(default=0, init=False)
    furthest: int = field(default=-1, init=False)

    def judge(self, ending: Ending) -> Verdict:
        final = _final_code(ending)
        if final is not None:
            return Verdict(False, f"the run ended: {NAMED.get(final, final)}", final)
        if ending.lasting is not None:
            return Verdict(False, f"{ending.lasting}; trying again would not help", ExitCode.DATA_FAILURE)
        if ending.code == ExitCode.DATA_FAILURE and ending.furthest_step <= self.step_at_launch:
            return Verdict(False, "the data failed before the first step: trying again would not help", ending.code)
        return self._spend(ending)

    def _spend(self, ending: Ending) -> Verdict:
        """A crash, a stall or lost data: try again while it leads anywhere."""
        cause = (
            f"the watchdog stopped it ({ending.alarm.kind})" if ending.alarm else f"it ended with {_words(ending.code)}"
        )
        self.fruitless = 0 if ending.furthest_step > self.furthest else self.fruitless + 1
        self.furthest = max(self.furthest, ending.furthest_step)
        code = ExitCode.ANOMALY if ending.alarm else ending.code if ending.code > 0 else ExitCode.CRASH
        if self.fruitless >= self.without_progress:
            reason = f"{cause}; {self.fruitless} restarts brought no progress beyond step {self.furthest}"
            return Verdict(False, reason, code)
        if self.used >= self.restarts:
            return Verdict(False, f"{cause}; all {self.restarts} restarts are used up", code)
        self.used += 1
        delay = min(self.first_delay_s * 2**self.fruitless, self.longest_delay_s)
        return Verdict(
            True, f"{cause} at step {ending.furthest_step}; restart {self.used} of {self.restarts}", 0, delay
        )


def _final_code(ending: Ending) -> int | None:
    """The code to stop with, for endings after which nobody wants a restart."""
    if ending.code in (ExitCode.ANOMALY, ExitCode.USAGE):
        return ending.code  # also when the other ranks had to be stopped, because they waited for the one that failed
    if ending.code == ExitCode.DONE and not (ending.alarm and ending.alarm.severity == "halt"):
        return ending.code  # a stall on the way out changes nothing
    if ending.alarm is not None:
        return ExitCode.ANOMALY if ending.alarm.severity == "halt" else None
    if ending.term_sent and ending.code != ExitCode.DONE:
        return ending.code if ending.code in (ExitCode.HALTED, ExitCode.ANOMALY) else ExitCode.PREEMPTED
    stops = (ExitCode.DONE, ExitCode.USAGE, ExitCode.HALTED, ExitCode.PREEMPTED, ExitCode.ANOMALY)
    return ending.code if ending.code in stops else None


def true_exit_code(process_code: int, said_by_rank: Mapping[int, int | None]) -> int:
    """torchrun answers 1 whatever its workers exit with; what they said in their last heartbeats is the truth."""
    if process_code == -15:  # TERM before the worker could handle it
        return ExitCode.PREEMPTED
    said = [code for code in said_by_rank.values() if code is not None]
    if process_code != ExitCode.CRASH or not said:
        return process_code
    for code in TELLING:
        if code in said:
            return code
    return said[0] if len(set(said)) == 1 and len(said) == len(said_by_rank) else process_code


def _words(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code} ({NAMED[code]})" if code in NAMED else f"exit code {code} (crash)"
