"""Whether a run that ended is started again: pure rules on its exit code, its progress and the restart budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tamis.run.files.events import Alarm
from tamis.run.files.exit_codes import ExitCode

NAMED = {code.value: code.name.lower().replace("_", " ") for code in ExitCode}
TELLING = (ExitCode.ANOMALY, ExitCode.DATA_FAILURE, ExitCode.USAGE)  # the rank with this code caused the end


@dataclass(frozen=True)
class Ending:
    """How one attempt ended."""

    code: int
    furthest_step: int  # the last step any attempt has finished
    alarm: Alarm | None = None  # the watchdog stopped the attempt for this
    term_sent: bool = False  # the supervisor received TERM or INT, and passed it on
    lasting: str | None = None  # the error of a rank that marked it as lasting
    cost_limit: str | None = None  # the limit on cost or hours that is reached


@dataclass(frozen=True)
class RestartDecision:
    restart: bool
    reason: str
    code: int = 0  # to exit with, when there is no restart
    delay_s: float = 0.0
    budget_spent: bool = False  # the restarts are used up, or lead nowhere


RESTART = None  # in the table below: not final, the restart budget decides
ENDED = (  # columns of the table
    "by itself",
    "after TERM to the supervisor",
    "by a stall alarm",
    "by a halt alarm",
    "at the cost limit",
)
FINAL_CODE: dict[int | None, tuple[int | None, ...]] = {
    ExitCode.DONE: (0, 0, 0, 5, 0),
    ExitCode.USAGE: (2, 2, 2, 2, 2),
    ExitCode.HALTED: (3, 3, RESTART, 5, 7),
    ExitCode.PREEMPTED: (4, 4, RESTART, 5, 7),
    ExitCode.ANOMALY: (5, 5, 5, 5, 5),
    None: (RESTART, 4, RESTART, 5, 7),  # a crash, a signal, a data failure
}


@dataclass
class RestartBudget:
    """How many restarts a launch has left, and what its attempts achieved."""

    restarts: int = 10
    without_progress: int = 3  # restarts in a row that may end at the step of the one before
    first_delay_s: float = 2.0  # doubled with each restart without progress; none after a signal to a run that went on
    longest_delay_s: float = 300.0
    step_at_launch: int = 0
    used: int = field(default=0, init=False)
    fruitless: int = field(default=0, init=False)
    furthest: int = field(default=-1, init=False)

    def decide(self, ending: Ending) -> RestartDecision:
        final = final_code(ending)
        if final == ExitCode.COST_LIMIT:
            return RestartDecision(False, str(ending.cost_limit), final)
        if final is not None:
            return RestartDecision(False, f"the run ended: {NAMED.get(final, final)}", final)
        if ending.lasting is not None:
            return RestartDecision(False, f"{ending.lasting}; trying again would not help", ExitCode.DATA_FAILURE)
        if ending.code == ExitCode.DATA_FAILURE and ending.furthest_step <= self.step_at_launch:
            reason = "the data failed before the first step: trying again would not help"
            return RestartDecision(False, reason, ending.code)
        return self._spend(ending)

    def _spend(self, ending: Ending) -> RestartDecision:
        """Restart after a crash, a stall or a data failure, while restarts lead to new steps."""
        cause = (
            f"the watchdog stopped it ({ending.alarm.kind})" if ending.alarm else f"it ended with {_words(ending.code)}"
        )
        self.fruitless = 0 if ending.furthest_step > self.furthest else self.fruitless + 1
        self.furthest = max(self.furthest, ending.furthest_step)
        code = ExitCode.ANOMALY if ending.alarm else ending.code if ending.code > 0 else ExitCode.CRASH
        if self.fruitless >= self.without_progress:
            reason = f"{cause}; {self.fruitless} restarts brought no progress beyond step {self.furthest}"
            return RestartDecision(False, reason, code, budget_spent=True)
        if self.used >= self.restarts:
            reason = f"{cause}; all {self.restarts} restarts are used up"
            return RestartDecision(False, reason, code, budget_spent=True)
        self.used += 1
        # A killed process leaves nothing to wait for. Of an error the cause may pass: a network, a full memory.
        was_killed = ending.code < 0 and ending.alarm is None and self.fruitless == 0
        delay = 0.0 if was_killed else min(self.first_delay_s * 2**self.fruitless, self.longest_delay_s)
        return RestartDecision(
            True, f"{cause} at step {ending.furthest_step}; restart {self.used} of {self.restarts}", 0, delay
        )


def final_code(ending: Ending) -> int | None:
    """The exit code of an ending that is final; None when a restart may follow."""
    how = "after TERM to the supervisor" if ending.term_sent else "by itself"
    if ending.alarm is not None:
        how = f"by a {ending.alarm.severity} alarm"
    if ending.cost_limit is not None and how != "by a halt alarm":
        how = "at the cost limit"
    return FINAL_CODE.get(ending.code, FINAL_CODE[None])[ENDED.index(how)]


def true_exit_code(process_code: int, by_rank: Mapping[int, int | None]) -> int:
    """The exit code behind torchrun's, which is 1 for any failure: the one in the ranks' final heartbeats."""
    if process_code == -15:  # TERM before the worker had a handler
        return ExitCode.PREEMPTED
    reported = [code for code in by_rank.values() if code is not None]
    if process_code != ExitCode.CRASH or not reported:
        return process_code
    for code in TELLING:
        if code in reported:
            return code
    return reported[0] if len(set(reported)) == 1 and len(reported) == len(by_rank) else process_code


def _words(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code} ({NAMED[code]})" if code in NAMED else f"exit code {code} (crash)"
