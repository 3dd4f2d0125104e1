"""Criterion on the blocks that the NSA layers select, from rank 0's heartbeats."""

from __future__ import annotations

from tamis.config import Config
from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, not_applicable, not_measured, pass_if
from tamis.run.limits import LEAST_DISTINCT_BLOCKS

FORCED_NEWEST_BLOCKS = 2  # always selected, as block 0 is


def selection_healthy(evidence: Evidence) -> Finding:
    """Require that no layer's queries all select the same few blocks; distance and likeness are evidence only."""
    beats = [beat for beat in evidence.step_ends.get(0, []) if beat.selection_distinct]
    if not beats:
        return _no_selection(evidence)
    last = beats[-1]
    worst = min(last.selection_distinct or [0.0])
    others = {"distance": last.selection_distance, "likeness of neighbours": last.selection_likeness}
    means = [f"{name} {sum(values) / len(values):.2f}" for name, values in others.items() if values]
    return pass_if(
        worst >= LEAST_DISTINCT_BLOCKS,
        f"at least {worst:.0%} of the older blocks are selected in every layer (limit {LEAST_DISTINCT_BLOCKS:.0%}); "
        f"means: {', '.join(means) or 'none'} at step {last.step}",
        last.ts,
    )


def _no_selection(evidence: Evidence) -> Finding:
    config = evidence.config or Config()
    if config.model.attention == "dense":
        return not_applicable("dense attention selects no blocks")
    if not config.train.aux_stats:
        return not_applicable("train.aux_stats is off")
    if config.train.seq_len // 2 // config.nsa.l_sel - FORCED_NEWEST_BLOCKS < 1:
        return not_applicable(f"sequences of {config.train.seq_len} tokens leave no blocks to choose")
    return not_measured("the heartbeats hold no selection statistics")
