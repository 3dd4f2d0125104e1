"""The figures that open the report of a run: loss, perplexity, tokens, hours, speed, verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding
from tamis.run.checks.runbooks import summary


@dataclass(frozen=True)
class Figure:
    name: str
    value: str
    note: str = ""


def headline(evidence: Evidence, results: Mapping[str, list[Finding]]) -> list[Figure]:
    """The figures that were measured, the most important first."""
    word, _, reason = summary([finding for findings in results.values() for finding in findings]).partition(": ")
    return [*_losses(evidence), *_amounts(evidence), Figure("verdict", word, reason)]


def tokens_per_step(evidence: Evidence) -> int | None:
    """Tokens of one optimizer step of all ranks, as run.info has them."""
    count = evidence.info.get("tokens_per_step")
    return count if isinstance(count, int) and count > 0 else None


def _losses(evidence: Evidence) -> list[Figure]:
    if evidence.validation:
        last = evidence.validation[-1]
        figures = [Figure("validation loss", f"{last.loss:.4f}", f"at step {last.step:,}")]
        return figures + ([Figure("perplexity", f"{last.ppl:,.2f}")] if math.isfinite(last.ppl) else [])
    if evidence.training:
        row = evidence.training[-1]
        return [Figure("training loss", f"{row.loss:.4f}", f"at step {row.step:,}; no validation yet")]
    return []


def _amounts(evidence: Evidence) -> list[Figure]:
    figures, count, planned = [], tokens_per_step(evidence), evidence.planned_steps
    of = f" of {planned:,}" if planned else ""
    if count and evidence.last_step:
        figures.append(Figure("tokens", _short(count * evidence.last_step), f"{evidence.last_step:,}{of} steps"))
    if points := evidence.hours_by_step:
        figures.append(Figure("hours", f"{points[-1][1]:.2f}", evidence.span))
    if speeds := [row.toks_per_s for row in evidence.training if math.isfinite(row.toks_per_s)]:
        figures.append(Figure("tokens per second", f"{median(speeds):,.0f}", "median"))
    return figures


def _short(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:,.1f}{unit}"
    return f"{count:,.0f}"
