"""`tamis report RUN`: one HTML page with the curves, the criteria and the facts of a run. It needs no network.

The page carries its own copy of plotly and forbids itself any connection; without scripts, the tables still read.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.run.checks.evidence import Evidence, read_evidence
from tamis.run.checks.findings import Finding, utc, verdict
from tamis.run.checks.runbooks import judge_runbooks
from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import read_manifest
from tamis.run.files.records import write_text_atomic
from tamis.run.handover import curves
from tamis.run.handover.curves import Series, thinned
from tamis.run.phase_runner import read_go_no_go

MOST_POINTS = 1500
SHOWN_EVENTS = 100


@dataclass(frozen=True)
class Chart:
    title: str
    series: Callable[[Evidence], Series]
    unit: str
    over: str = "step"
    from_zero: bool = True


CHARTS = (
    Chart("Loss", curves.loss_curves, "nats per token", from_zero=False),
    Chart("Throughput", curves.speed_curve, "tokens per second"),
    Chart("Gradient norm", curves.gradient_curve, "before clipping"),
    Chart("Learning rate", curves.learning_rate_curve, ""),
    Chart("Step time", curves.step_time_curves, "seconds"),
    Chart("Gate entropy by layer", curves.entropy_curves, "nats; three equal gates: 1.0986"),
    Chart("Share of each branch, mean of the layers", curves.share_curves, ""),
    Chart("GPU memory allocated", curves.memory_curves, "GiB"),
    Chart("GPU utilisation", curves.utilisation_curves, "percent", over="minutes"),
)


def write_report(run: RunDirectory | str | Path) -> Path:
    """Judge the run and write OUT/report.html; returns its path."""
    evidence = read_evidence(run)
    output = evidence.directory.path / "report.html"
    write_text_atomic(output, page(evidence, judge_runbooks(evidence)))
    return output


def page(
    evidence: Evidence, results: Mapping[str, list[Finding]], redact: Callable[[str], str] = lambda text: text
) -> str:
    """The whole page; `redact` goes over everything that comes from the run."""
    charts = [drawn for chart in CHARTS if (drawn := _chart(chart, evidence))["data"]]
    name = evidence.info.get("model") or evidence.directory.path.name
    sections = [
        f"<h1>{_text(name)}</h1><p>{_text(_subtitle(evidence))}; judged {utc(time.time())}</p>",
        "<h2>Curves</h2>" + ("".join(_chart_place(i) for i in range(len(charts))) or "<p>Nothing was logged.</p>"),
        *(_criteria_section(title, findings) for title, findings in results.items()),
        *map(_phase_section, read_go_no_go(evidence.directory)),
        _facts_section("Run", evidence.info),
        _checkpoint_section(evidence),
        _event_section(evidence),
    ]
    return TEMPLATE.format(
        title=_text(redact(f"{name}: training report")),
        body=redact("\n".join(sections)),
        plotly=_plotly(),
        charts=_json(charts),
    )


def _subtitle(evidence: Evidence) -> str:
    parts = [evidence.span, f"{evidence.last_step:,} steps"]
    if count := evidence.info.get("parameters"):
        parts.insert(0, f"{count:,} parameters")
    if evidence.validation:
        last = evidence.validation[-1]
        parts.append(f"validation loss {last.loss:.4f}, perplexity {last.ppl:,.2f} at step {last.step}")
    return "; ".join(parts)


def _chart(chart: Chart, evidence: Evidence) -> dict[str, Any]:
    """Data and layout as plotly takes them; no data when nothing was measured."""
    series = {name: thinned(points, MOST_POINTS) for name, points in chart.series(evidence).items() if points}
    traces = [
        {"name": name, "x": [x for x, _ in points], "y": [y for _, y in points], "mode": _mode(points)}
        for name, points in series.items()
    ]
    y_axis = {"title": {"text": chart.unit}, "rangemode": "tozero" if chart.from_zero else "normal"}
    layout = {
        "title": {"text": chart.title},
        "xaxis": {"title": {"text": chart.over}},
        "yaxis": y_axis | {"exponentformat": "e"},
        "showlegend": len(traces) > 1,
        "margin": {"l": 70, "r": 20, "t": 45, "b": 45},
    }
    return {"data": traces, "layout": layout}


def _mode(points: Sequence[tuple[float, float]]) -> str:
    return "lines+markers" if len(points) < 30 else "lines"


def _chart_place(number: int) -> str:
    return f'<div class="chart" id="chart{number}"></div>'


def _criteria_section(title: str, findings: Sequence[Finding]) -> str:
    rows = [
        (f'<td class="{finding.status.replace(" ", "-")}">{_text(finding.status)}</td>', finding.name, *_proof(finding))
        for finding in findings
    ]
    body = "".join(
        f'<tr>{status}<td>{_text(name)}</td><td>{_text(proof)}</td><td class="time">{when}</td></tr>'
        for status, name, proof, when in rows
    )
    head = "<tr><th>result</th><th>criterion</th><th>evidence</th><th>time</th></tr>"
    return f"<h2>{_text(title)}</h2><p><b>{_text(verdict(findings))}</b></p><table>{head}{body}</table>"


def _proof(finding: Finding) -> tuple[str, str]:
    evidence = f"{finding.evidence} → {finding.remedy}" if finding.remedy else finding.evidence
    return evidence, utc(finding.at) if finding.at else ""


def _phase_section(record: dict[str, Any]) -> str:
    title = f"Phase {record['phase']}: {record['title']}, judged {record['judged_at']}"
    return _criteria_section(title, [Finding(**finding) for finding in record["findings"]])


def _facts_section(title: str, facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_fact(value)}</td></tr>" for name, value in facts.items())
    return f"<h2>{_text(title)}</h2><table>{rows}</table>" if rows else ""


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return "<br>".join(_text(item) for item in value) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _text("unknown" if value is None else value)


def _checkpoint_section(evidence: Evidence) -> str:
    rows = "".join(_checkpoint_row(evidence, step) for step in evidence.directory.checkpoints())
    head = "<tr><th>step</th><th>bytes</th><th>written</th><th>sha256</th></tr>"
    return f"<h2>Checkpoints</h2><table>{head}{rows}</table>" if rows else "<h2>Checkpoints</h2><p>None.</p>"


def _checkpoint_row(evidence: Evidence, step: int) -> str:
    try:
        manifest = read_manifest(evidence.directory.manifest(step))
    except ValueError as error:
        return f"<tr><td>{step}</td><td colspan=3>{_text(error)}</td></tr>"
    cells = (step, f"{manifest['bytes']:,}", manifest.get("time", ""), manifest["sha256"])
    return "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"


def _event_section(evidence: Evidence) -> str:
    rows = "".join(
        f"<tr><td>{utc(event['ts'])}</td><td>{_text(event.get('by'))}</td><td>{_text(event.get('event'))}</td>"
        f"<td>{_text(event.get('reason'))}</td></tr>"
        for event in evidence.events[-SHOWN_EVENTS:]
    )
    return f"<h2>Events</h2><table>{rows}</table>" if rows else ""


def _text(value: object) -> str:
    return html.escape(str(value))


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1d2433; max-width: 1200px; margin: 2em auto; padding: 0 1em; }}
h1 {{ margin-bottom: 0; }}
h2 {{ margin-top: 2em; border-bottom: 1px solid #d8dde6; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ text-align: left; vertical-align: top; padding: .25em .6em; border-bottom: 1px solid #eef0f4;
 overflow-wrap: anywhere; }}
th {{ white-space: nowrap; }}
td.pass {{ color: #0a7d33; }}
td.fail {{ color: #b3261e; font-weight: bold; }}
td.not-measured {{ color: #8a6100; }}
td.not-measured, td.time {{ white-space: nowrap; }}
.chart {{ display: inline-block; width: 49%; min-width: 420px; height: 340px; }}
</style>
</head>
<body>
{body}
<script>{plotly}</script>
<script>
const charts = {charts};
charts.forEach((chart, i) => Plotly.newPlot("chart" + i, chart.data, chart.layout,
  {{responsive: true, displaylogo: false}}));
</script>
</body>
</html>
"""
