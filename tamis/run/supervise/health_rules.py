"""Health rules as pure functions: whether losses, gradients, gates and memory in the heartbeats are plausible.

Gates are three sigmoids per head; their shares of the sum have an entropy between 0 (one branch takes all: collapsed)
and ln 3 (three equal branches). ln 3 is where gates start, so it proves nothing; gates whose shares and entropy have
not moved after many steps never learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from tamis.run.files.events import Alarm
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.limits import (
    AGREEING_BEATS,
    COLLAPSED_ENTROPY,
    COLLAPSED_FRACTION,
    CREEP_GIB,
    CREEP_SHARE,
    DIVERGED_NATS,
    EXPLODED_TIMES,
    GATES_LEARN_WITHIN_STEPS,
    GATES_MOVED,
    LOW_ENTROPY,
    ZERO_GRADIENT,
    Limits,
)
from tamis.run.supervise.history import RunHistory


def health_alarms(history: RunHistory, limits: Limits) -> list[Alarm]:
    rules: list[Callable[[RunHistory, Limits], Alarm | None]] = [
        _not_finite,
        _too_good,
        _diverging,
        _zero_gradient,
        _exploding_gradient,
        _gates_collapsed,
        _gates_never_learned,
        _memory_creeping,
    ]
    return [alarm for rule in rules if (alarm := rule(history, limits))]


def save_alarms(history: RunHistory) -> list[Alarm]:
    """One alarm while the newest save of a rank has failed. The trainer ends the run at train.max_unsaved_steps."""
    failed = max((r.failed_save for r in history.ranks.values() if r.failed_save), key=lambda b: b.ts, default=None)
    if failed is None:
        return []
    reason = f"the checkpoint of step {failed.step} was not saved: {failed.save_error}"
    return [Alarm("save_failed", "note", reason, failed.rank, {"step": failed.step})]


def _last(history: RunHistory, field: str, count: int = AGREEING_BEATS) -> list[float] | None:
    """The last `count` logged values of a field, or None while there are fewer."""
    values = [value for beat in history.logged if (value := getattr(beat, field)) is not None]
    return values[-count:] if len(values) >= count else None


def _not_finite(history: RunHistory, limits: Limits) -> Alarm | None:
    """A non-finite loss; the trainer's own guard stops first, so this is for one whose guard failed."""
    for beat in (rank.recent[-1] for rank in history.ranks.values() if rank.recent):
        if beat.loss is not None and not math.isfinite(beat.loss):
            reason = f"rank {beat.rank} reports the loss {beat.loss} at step {beat.step}"
            return Alarm("non_finite_loss", "halt", reason, beat.rank, {"step": beat.step, "loss": str(beat.loss)})
    return None


def _too_good(history: RunHistory, limits: Limits) -> Alarm | None:
    losses = _last(history, "loss")
    if limits.loss_floor is None or losses is None or max(losses) >= limits.loss_floor:
        return None
    reason = (
        f"the loss is {losses[-1]:.4f}, implausible below {limits.loss_floor:.2f} on text a model has not seen: the "
        "target leaks into the input, or the model has memorised its data. train.min_loss moves the limit, 0 lifts it"
    )
    return Alarm("loss_too_good", "halt", reason, None, {"losses": losses, "floor": limits.loss_floor})


def _diverging(history: RunHistory, limits: Limits) -> Alarm | None:
    loss, best = history.recent_loss(), history.best_loss
    if loss is None or best is None or loss <= best + max(DIVERGED_NATS, best / 3):
        return None
    reason = f"the loss has risen to {loss:.3f} after {best:.3f} and stays there: it diverges"
    return Alarm("loss_diverging", "halt", reason, None, {"recent_loss": loss, "best_loss": best})


def _zero_gradient(history: RunHistory, limits: Limits) -> Alarm | None:
    norms = _last(history, "grad_norm")
    if norms is None or max(norms) > ZERO_GRADIENT:
        return None
    reason = f"the gradient norm is {norms[-1]:.1e}: nothing is being learned"
    return Alarm("zero_gradient", "halt", reason, None, {"grad_norms": norms})


def _exploding_gradient(history: RunHistory, limits: Limits) -> Alarm | None:
    norms = [n for b in history.logged if (n := b.grad_norm) is not None and math.isfinite(n)]
    if len(norms) < 30:
        return None
    usual, recent = median(norms), norms[-5:]
    if usual <= 0 or min(recent) < EXPLODED_TIMES * usual:
        return None
    reason = f"the gradient norm is {recent[-1]:.3g}, {usual:.3g} is usual: it has exploded"
    return Alarm("exploding_gradient", "halt", reason, None, {"grad_norms": recent, "usual": usual})


def _gates_collapsed(history: RunHistory, limits: Limits) -> Alarm | None:
    entropies, fractions = _last(history, "gate_entropy_mean"), _last(history, "gate_collapse_fraction")
    evidence = {"gate_entropy_mean": entropies, "gate_collapse_fraction": fractions}
    low = entropies is not None and max(entropies) < COLLAPSED_ENTROPY
    if low or (fractions is not None and min(fractions) > COLLAPSED_FRACTION):
        reason = "the gates have collapsed: one branch of attention takes nearly all"
        return Alarm("gate_collapse", "halt", reason, None, evidence)
    if entropies is not None and max(entropies) < LOW_ENTROPY:
        return Alarm("gate_entropy_low", "note", f"gate entropy is {entropies[-1]:.2f} nats", None, evidence)
    return None


def _gates_never_learned(history: RunHistory, limits: Limits) -> Alarm | None:
    first = history.gates_at_first
    now = next((beat for beat in reversed(history.logged) if beat.gate_shares is not None), None)
    if first is None or now is None or now.step - first.step < GATES_LEARN_WITHIN_STEPS:
        return None
    changes = [abs(a - b) for a, b in zip(_gate_numbers(first), _gate_numbers(now), strict=False)]
    moved = max(changes, default=math.inf)  # no numbers: nothing shows that the gates stand still
    if moved >= GATES_MOVED:
        return None
    reason = f"no gate of any layer has moved by more than {moved:.1e} in {now.step - first.step} steps"
    return Alarm("gates_never_learn", "halt", reason, None, {"from_step": first.step, "to_step": now.step})


def _gate_numbers(beat: Heartbeat) -> list[float]:
    shares = [share for layer in beat.gate_shares or [] for share in layer]
    return shares + (beat.gate_entropy or [])


def _memory_creeping(history: RunHistory, limits: Limits) -> Alarm | None:
    """Five stretches of the run, each using more GPU memory than the one before: a leak."""
    for rank in history.ranks.values():
        used = [m for beat in rank.recent if (m := beat.gpu_mem_alloc_gib) is not None]
        if len(used) < 200:
            continue
        size = len(used) // 5
        lows = [min(used[i * size : (i + 1) * size]) for i in range(5)]
        growth = lows[-1] - lows[0]
        steady = all(later > earlier for earlier, later in pairwise(lows))
        if steady and growth > max(CREEP_GIB, CREEP_SHARE * lows[0]):
            reason = f"GPU memory of rank {rank.rank} creeps: {lows[0]:.2f} to {lows[-1]:.2f} GiB in {len(used)} steps"
            return Alarm("memory_creeping", "note", reason, rank.rank, {"lowest_gib": lows})
    return None
