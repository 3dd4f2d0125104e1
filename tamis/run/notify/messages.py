"""One message to the operator: which events lead to one, what it tells, and its text and JSON forms."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tamis.config import Config
from tamis.run.checks.evidence import read_config
from tamis.run.cost import CostMeter, money
from tamis.run.eta import duration_text, measure_progress
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.info import read_info
from tamis.run.files.records import utc
from tamis.run.monitor.snapshot import active_directory

RESUME = "launch again to resume from the newest checkpoint"
NOTHING = "nothing"
RECENT_BEATS = 300  # about a hundred steps
WHAT_TO_DO = {  # by the message's event; {out} is the run directory
    "start": "watch it with tamis monitor {out}; stop it with touch {out}/.HALT",
    "phase": f"{NOTHING}: the next phase follows",
    "no_go": "read {out}/go_no_go.txt, repair it and launch again",
    "first_checkpoint": NOTHING,
    "note": "look at it when you have time: tamis monitor {out}",
    "stall": f"{NOTHING} yet: the workers are stopped and started again; their stacks are in {{out}}/stackdump_*.txt",
    "restart": f"{NOTHING} yet: it continues from the newest checkpoint",
    "anomaly": "read {out}/.anomaly_type and look at the curves (tamis report {out}) before you launch again",
    "budget_spent": f"read the end of train.log and {{out}}/events.jsonl; once it is repaired, {RESUME}",
    "failed": f"read the end of train.log and {{out}}/events.jsonl; once it is repaired, {RESUME}",
    "halt": RESUME,
    "preempted": RESUME,
    "cost_limit": f"raise the limit and {RESUME}, or stop the machine",
    "done": "take the result (tamis handoff {out}), then stop the machine",
    "digest": NOTHING,
    "idle": "take the result (tamis handoff {out}) and stop the machine",
    "on_end": NOTHING,
    "on_end_failed": "stop the machine yourself; {out}/on_end.log has the output of the command",
    "kept": "stop the machine yourself when you are done with it",
    "test": NOTHING,
}
SENT_AS = {
    "start": "start",
    "restart": "restart",
    "phase_verdict": "phase",
    "save_failed": "note",
    "damaged": "note",
    "copy_failed": "note",
    "adopt": "note",
    "on_end": "on_end",
    "on_end_failed": "on_end_failed",
    "kept": "kept",
}  # events of events.jsonl
SENT_AT_END = {  # by exit code; any other: failed
    ExitCode.DONE: "done",
    ExitCode.HALTED: "halt",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.ANOMALY: "anomaly",
    ExitCode.COST_LIMIT: "cost_limit",
}
SENT_FOR_ALARM = {"stall": "stall", "halt": "anomaly", "note": "note"}  # by severity


@dataclass(frozen=True)
class Message:
    event: str
    run: str
    step: int
    message: str
    what_to_do: str
    time: str
    steps: int | None = None
    loss: float | None = None
    toks_per_s: float | None = None
    eta: str | None = None
    cost_so_far: float | None = None
    must_arrive: bool = False  # never dropped to limit the number of messages

    def payload(self) -> dict[str, Any]:
        """The fields of the JSON document; numbers that are not finite, which JSON lacks, are null."""
        fields = {name: value for name, value in vars(self).items() if name != "must_arrive"}
        return {name: None if _is_not_finite(value) else value for name, value in fields.items()}

    @property
    def title(self) -> str:
        return f"{self.run}: {self.event.replace('_', ' ')}"

    @property
    def text(self) -> str:
        """The message for a person."""
        facts = [f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")]
        facts += [] if self.loss is None else [f"loss {self.loss:.4f}"]
        facts += [] if self.toks_per_s is None else [f"{self.toks_per_s:,.0f} tok/s"]
        facts += [] if self.eta is None else [f"ETA {self.eta}"]
        facts += [] if self.cost_so_far is None else [f"{money(self.cost_so_far)} so far"]
        return "\n".join([self.message, ", ".join(facts), f"What to do: {self.what_to_do}"])


def sent_for(event: Mapping[str, Any]) -> str | None:
    """The event of the message that a line of events.jsonl leads to; None for none."""
    name, evidence = event["event"], event["evidence"]
    if name == "end":
        return "budget_spent" if evidence.get("budget_spent") else sent_at_end(evidence.get("exit_code"))
    return SENT_AS.get(name) or SENT_FOR_ALARM.get(str(evidence.get("severity")))


def sent_at_end(code: object) -> str:
    return SENT_AT_END.get(code, "failed") if isinstance(code, int) else "failed"  # type: ignore[call-overload]


def compose(
    event: str,
    reason: str,
    config: Config,
    out: RunDirectory,
    meter: CostMeter,
    *,
    is_final: bool = False,
    is_running: bool = False,
) -> Message:
    """A message with the run's newest figures; with an ETA while the run is running."""
    price = config.cost.per_hour
    remedy = WHAT_TO_DO["no_go" if event == "phase" and "NO-GO" in reason else event]
    if is_final and price:
        reason += f". The machine still costs {money(price)} an hour"
    if is_final and config.cost.on_end and event != "preempted":
        reason += (
            f". cost.on_end follows {duration_text(config.cost.grace_s)} after the end: touch {out.keep} cancels it"
        )
    return Message(
        event=event,
        run=config.train.out_dir,
        message=reason,
        what_to_do=remedy.format(out=config.train.out_dir),
        time=utc(),
        cost_so_far=round(meter.spent().cost, 4) if price else None,
        must_arrive=is_final,
        **_figures(active_directory(out), is_running=is_running),
    )


def _figures(run: RunDirectory, is_running: bool) -> dict[str, Any]:
    """Step, loss, speed and ETA from the last heartbeats of rank 0; a snapshot of the monitor would read far more."""
    ends = [beat for beat in read_heartbeats(run.heartbeat(0), tail=RECENT_BEATS) if beat.phase == "step_end"]
    config = read_config(run)
    if not ends or config is None:
        return {"step": 0, "steps": config.train.steps if config else None}
    processes = read_info(run.run_info).get("processes") or len(run.heartbeats())
    progress = measure_progress(ends, config.tokens_per_step(processes), config.train.steps, is_running=is_running)
    eta_s = progress.eta_s
    return {
        "step": ends[-1].step,
        "steps": config.train.steps,
        "loss": next((beat.loss for beat in reversed(ends) if beat.loss is not None), None),
        "toks_per_s": progress.tokens_per_s or ends[-1].toks_per_s,
        "eta": f"{utc(time.time() + eta_s)}, in {duration_text(eta_s)}" if eta_s else None,
    }


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
