"""Criteria, findings and the Go/No-Go table: shared by preflight, phases, judge and handoff.

`pass` means measured and within the limit. `fail` means a measured breach, or a required file that is missing.
`not measured` means that it applies to this run but nothing shows it yet: while such a line is left, there is no GO.
`not applicable` means that this machine or config has nothing to measure, such as the gates of dense attention.
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

from tamis.run.files.console import printable_line
from tamis.run.files.records import is_time, utc, write_json_atomic, write_text_atomic

Status = Literal["pass", "fail", "not measured", "not applicable"]
STYLES = {"pass": "green", "fail": "bold red", "not measured": "yellow", "not applicable": "dim"}
VERDICT_STYLES = {"GO": "green", "NO-GO": "bold red", "OPEN": "yellow"}


@dataclass(frozen=True)
class Finding:
    status: Status
    evidence: str  # what was measured, with its limit
    at: float | None = None  # Unix time of the deciding evidence; None: when it was judged
    name: str = ""
    remedy: str = ""  # what to try; set only on failures


@dataclass(frozen=True)
class Criterion:
    """A sentence about a run, the function that measures it, and what to try when it does not hold."""

    name: str
    measure: Callable[[Any], Finding]
    remedy: str = ""

    def apply(self, subject: Any) -> Finding:
        found = self.measure(subject)
        remedy = (found.remedy or self.remedy) if found.status == "fail" else ""
        return replace(found, name=self.name, remedy=remedy)


def passed(evidence: str, at: float | None = None) -> Finding:
    return Finding("pass", evidence, at)


def failed(evidence: str, remedy: str = "", at: float | None = None) -> Finding:
    return Finding("fail", evidence, at, remedy=remedy)


def not_measured(reason: str) -> Finding:
    return Finding("not measured", reason)


def not_applicable(reason: str) -> Finding:
    return Finding("not applicable", reason)


def pass_if(holds: bool, evidence: str, at: float | None = None) -> Finding:
    return passed(evidence, at) if holds else failed(evidence, at=at)


def is_go(findings: Iterable[Finding]) -> bool:
    """True if something passed, nothing failed, and every line that applies was measured."""
    return verdict_word(list(findings)) == "GO"


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def verdict_word(findings: Sequence[Finding]) -> str:
    """GO, NO-GO when a line failed, or OPEN while a line that applies was not measured."""
    statuses = {finding.status for finding in findings}
    if "fail" in statuses:
        return "NO-GO"
    return "GO" if "pass" in statuses and "not measured" not in statuses else "OPEN"


def verdict(findings: Sequence[Finding]) -> str:
    """The word and the number of lines of each kind, as `OPEN (2 passed, 9 not measured)`."""
    statuses = [finding.status for finding in findings]
    counts = [f"{statuses.count('fail')} failed"] if "fail" in statuses else [f"{statuses.count('pass')} passed"]
    counts += [f"{statuses.count('not measured')} not measured"] if "not measured" in statuses else []
    return f"{verdict_word(findings)} ({', '.join(counts)})"


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
        table.add_row(str(number), Text(printable_line(finding.name)), result, Text(_evidence_and_remedy(finding)))
    console.print(table)
    console.print(Text(verdict(findings), style=VERDICT_STYLES[verdict_word(findings)]))


def findings_text(title: str, findings: Sequence[Finding]) -> str:
    lines = [title]
    for number, finding in enumerate(findings, start=1):
        when, name = f" [{utc(finding.at)}]" if finding.at else "", printable_line(finding.name)
        lines.append(f"{number:2d}. {finding.status.upper():14s} {name}: {_evidence_and_remedy(finding)}{when}")
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


def parse_findings(records: object) -> list[Finding]:
    """Findings from a JSON document that `write_findings` or an earlier version wrote; anything else is skipped."""
    found = []
    for record in records if isinstance(records, list) else []:
        if isinstance(record, dict) and record.get("status") in STYLES:
            texts = {key: str(record.get(key, "")) for key in ("evidence", "name", "remedy")}
            at = record["at"] if is_time(record.get("at")) else None
            found.append(Finding(status=record["status"], at=at, **texts))
    return found


def _evidence_and_remedy(finding: Finding) -> str:
    return printable_line(f"{finding.evidence} → {finding.remedy}" if finding.remedy else finding.evidence)
