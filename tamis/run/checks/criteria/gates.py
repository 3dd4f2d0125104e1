"""Criteria on the gates of the three attention branches, from rank 0's heartbeats."""

from __future__ import annotations

import math
from collections.abc import Callable

from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, not_applicable, not_measured, pass_if
from tamis.run.limits import GATES_LEARN_WITHIN_STEPS, GATES_MOVED, LARGEST_COLLAPSE_FRACTION, LOW_ENTROPY


def gate_entropy_healthy(evidence: Evidence) -> Finding:
    return _at_the_end(evidence, "gate_entropy_mean", lambda value: value > LOW_ENTROPY, f"over {LOW_ENTROPY}")


def gates_not_collapsed(evidence: Evidence) -> Finding:
    limit = f"at most {LARGEST_COLLAPSE_FRACTION}"
    return _at_the_end(evidence, "gate_collapse_fraction", lambda value: value <= LARGEST_COLLAPSE_FRACTION, limit)


def gates_have_learned(evidence: Evidence) -> Finding:
    """Require movement: three equal gates have entropy ln 3 and look healthy without having learned anything."""
    beats = [beat for beat in evidence.step_ends.get(0, []) if beat.gate_shares]
    if not beats:
        return _no_gates(evidence)
    first, last = beats[0], beats[-1]
    if last.step - first.step < GATES_LEARN_WITHIN_STEPS - 1:
        return not_measured(f"gates over {last.step - first.step} steps, {GATES_LEARN_WITHIN_STEPS} needed")
    before, after = ([share for layer in beat.gate_shares or [] for share in layer] for beat in (first, last))
    moved = max(abs(a - b) for a, b in zip(before, after, strict=False))
    return pass_if(
        moved >= GATES_MOVED,
        f"largest change of a share {moved:.4f} from step {first.step} to {last.step}, at least {GATES_MOVED}",
        last.ts,
    )


def _at_the_end(evidence: Evidence, field: str, holds: Callable[[float], bool], limit: str) -> Finding:
    """Judge the worst value of the field in the last tenth of the steps."""
    beats = [beat for beat in evidence.step_ends.get(0, []) if getattr(beat, field) is not None]
    if not beats:
        return _no_gates(evidence)
    last = beats[-max(1, len(beats) // 10) :]
    values = [getattr(beat, field) for beat in last]
    worst = next((value for value in values if not (math.isfinite(value) and holds(value))), values[-1])
    return pass_if(
        math.isfinite(worst) and holds(worst), f"{worst:.4f} near step {last[-1].step}, {limit}", last[-1].ts
    )


def _no_gates(evidence: Evidence) -> Finding:
    if evidence.config and evidence.config.model.attention == "dense":
        return not_applicable("dense attention has no gates")
    if evidence.config and not evidence.config.train.aux_stats:
        return not_applicable("train.aux_stats is off")
    return not_measured("the heartbeats hold no gate statistics")
