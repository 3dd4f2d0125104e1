"""Criteria, findings and the Go/No-Go table: shared by preflight, phases, judge and handoff.

`pass` means measured and within the limit. `fail` means a measured breach, or a required file that is missing.
`not measured` means that this machine or config cannot show it; it never counts as a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tamis.run.files.records import utc as utc
from tamis.run.files.records import write_json_atomic, write_text_atomic

Status = Literal["pass", "fail", "not measured"]
STYLES = {"pass": "green", "fail": "bold red", "not measured": "yellow"}
VERDICT_STYLES = {"GO": "green", "NO-GO": "bold red", "OPEN": "yellow"}


@dataclass(frozen=True)
class Finding:
    status: Status
    evidence: str  # what was measured, with its limit
    at: float | None = None  # Unix time of the deciding evidence; None: when it was judged
    name: str = ""
    remedy: str = ""  # what to try; set only on failures
    is_needed: bool = False  # GO requires that this line was measured


@dataclass(frozen=True)
class Criterion:
    """A sentence about a run, the function that measures it, and what to try when it does not hold."""

    name: str
    measure: Callable[[Any], Finding]
    remedy: str = ""
    is_needed: bool = False

    def apply(self, subject: Any) -> Finding:
        found = self.measure(subject)
        remedy = (found.remedy or self.remedy) if found.status == "fail" else ""
        return replace(found, name=self.name, remedy=remedy, is_needed=self.is_needed)


def passed(evidence: str, at: float | None = None) -> Finding:
    return Finding("pass", evidence, at)


def failed(evidence: str, remedy: str = "", at: float | None = None) -> Finding:
    return Finding("fail", evidence, at, remedy=remedy)


def not_measured(reason: str) -> Finding:
    return Finding("not measured", reason)


def pass_if(holds: bool, evidence: str, at: float | None = None) -> Finding:
    return passed(evidence, at) if holds else failed(evidence, at=at)


def is_go(findings: Iterable[Finding]) -> bool:
    """True if nothing failed, something passed, and every needed line was measured."""
    return _word(list(findings)) == "GO"


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _word(findings: Sequence[Finding]) -> str:
    if has_failed(findings):
        return "NO-GO"
    return "GO" if any(finding.status == "pass" for finding in findings) and not _still_needed(findings) else "OPEN"


def _still_needed(findings: Iterable[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.is_needed and finding.status == "not measured"]


def verdict(findings: Sequence[Finding]) -> str:
    """GO, NO-GO, or OPEN while a needed line was not measured; with the number of lines of each kind."""
    word, statuses = _word(findings), [finding.status for finding in findings]
    counted: Status = "fail" if word == "NO-GO" else "pass"
    counts = f"{statuses.count(counted)} {counted}ed"
    if open_lines := statuses.count("not measured"):
        counts += f", {open_lines} not measured"
    needed = _still_needed(findings) if word == "OPEN" else []
    return f"{word} ({counts})" + (f": a Go needs {'; '.join(needed)}" if needed else "")


def print_findings(title: str, findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print a numbered table with the evidence per line, then the verdict; plain lines without a terminal."""
    console = console or Console()
    if not console.is_terminal:
        console.print(findings_text(title, findings), end="", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(title=title, title_justify="left", show_lines=False, pad_edge=False)
    for heading, options in (("#", {"justify": "right"}), ("criterion", {}), ("result", {}), ("evidence", {})):
        table.add_column(heading, overflow="fold", **options)  # type: ignore[arg-type]
    for number, finding in enumerate(findings, start=1):
        result = Text(finding.status.upper(), style=STYLES[finding.status])
        table.add_row(str(number), finding.name, result, Text(_evidence_and_remedy(finding)))
    console.print(table)
    console.print(Text(verdict(findings), style=VERDICT_STYLES[_word(findings)]))


def findings_text(title: str, findings: Sequence[Finding]) -> str:
    lines = [title]
    for number, finding in enumerate(findings, start=1):
        when = f" [{utc(finding.at)}]" if finding.at else ""
        lines.append(f"{number:2d}. {finding.status.upper():12s} {finding.name}: {_evidence_and_remedy(finding)}{when}")
    return "\n".join([*lines, verdict(findings), ""])


def write_findings(stem: Path, title: str, findings: Sequence[Finding], **facts: Any) -> None:
    """Write `stem`.json for programs and `stem`.txt for people."""
    document = {
        "title": title,
        "judged_at": utc(time.time()),
        "go": is_go(findings),
        "verdict": verdict(findings),
        **facts,
        "findings": [asdict(finding) for finding in findings],
    }
    write_json_atomic(stem.with_suffix(".json"), document)
    write_text_atomic(stem.with_suffix(".txt"), findings_text(f"{title}, judged {document['judged_at']}", findings))


def _evidence_and_remedy(finding: Finding) -> str:
    return f"{finding.evidence} → {finding.remedy}" if finding.remedy else finding.evidence
