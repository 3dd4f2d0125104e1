"""`tamis report RUN`: one HTML page with the curves, the criteria and the facts of a run. It needs no network.

The page carries its own copy of plotly and forbids every connection; without scripts the tables can still be read.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tamis.run.checks.evidence import Evidence, read_evidence
from tamis.run.checks.findings import Finding, parse_findings, verdict
from tamis.run.checks.runbooks import judge_runbooks
from tamis.run.cost import read_spent
from tamis.run.file_problems import file_problems
from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import read_manifest
from tamis.run.files.reading import read_json
from tamis.run.files.records import SampleLog, utc, write_text_atomic
from tamis.run.handover import curves
from tamis.run.handover.curves import Series, thinned
from tamis.run.handover.headline import Figure, headline, tokens_per_step
from tamis.run.phases import read_go_no_go

MOST_POINTS = 1500
SHOWN_EVENTS = 100
SHOWN_SAMPLES = 30
EVALUATION_COLUMNS = ("examples", "shots", "accuracy", "standard_error", "chance", "centred")


@dataclass(frozen=True)
class Chart:
    title: str
    series: Callable[[Evidence], Series]
    unit: str
    over: str = "step"
    from_zero: bool = True
    ticks: str = "SI"  # how plotly shortens large and small numbers
    is_compared: bool = False  # drawn for a second run too


CHARTS = (
    Chart("Loss", curves.loss_curves, "nats per token", from_zero=False, is_compared=True),
    Chart("Throughput", curves.speed_curve, "tokens per second", is_compared=True),
    Chart("Gradient norm", curves.gradient_curve, "before clipping", is_compared=True),
    Chart("Learning rate", curves.learning_rate_curve, "", ticks="e"),
    Chart("Step time", curves.step_time_curves, "seconds"),
    Chart("Gate entropy by layer", curves.entropy_curves, "nats; three equal gates: 1.0986"),
    Chart("Share of each branch, mean of the layers", curves.share_curves, ""),
    Chart("Selection, mean of the layers", curves.selection_curves, "shares, 0 to 1"),
    Chart("GPU memory allocated", curves.memory_curves, "GiB"),
    Chart("GPU utilisation", curves.utilisation_curves, "percent", over="minutes"),
    Chart("GPU clock", curves.clock_curves, "MHz", over="minutes"),
    Chart("GPU power", curves.power_curves, "W", over="minutes"),
)


def write_report(run: RunDirectory | str | Path, against: RunDirectory | None = None) -> Path:
    """Judge the run and write OUT/report.html, with the curves of a second run if one is given; returns its path."""
    evidence = read_evidence(run)
    other = None if against is None else read_evidence(against)
    output = evidence.directory.path / "report.html"
    write_text_atomic(output, report_page(evidence, judge_runbooks(evidence), against=other))
    return output


def report_page(
    evidence: Evidence,
    results: Mapping[str, list[Finding]],
    redact: Callable[[str], str] = lambda text: text,
    against: Evidence | None = None,
) -> str:
    """Render the page; `redact` is applied to everything except plotly's own source."""
    charts = [drawn for chart in CHARTS if (drawn := _chart(chart, evidence, against))["data"]]
    figures = headline(evidence, results)
    text = _template().render(
        name=evidence.info.get("model") or evidence.directory.path.name,
        subtitle=_subtitle(evidence),
        judged_at=utc(time.time()),
        headline=figures,
        comparison=None if against is None else _comparison(figures, against),
        chart_count=len(charts),
        charts=script_json(charts),
        clock=script_json(thinned(sorted(dict(evidence.hours_by_step).items()), MOST_POINTS)),
        tokens_per_step=script_json(tokens_per_step(evidence)),
        tables=[*(_table(title, findings) for title, findings in results.items()), *_phase_tables(evidence)],
        problems=file_problems(evidence.directory),
        facts={key: _fact(value) for key, value in evidence.info.items()} | _cost(evidence.directory),
        checkpoints=[_checkpoint_cells(evidence, step) for step in evidence.directory.checkpoints()],
        evaluation=_evaluation(evidence.directory),
        samples=SampleLog(evidence.directory.samples).read(SHOWN_SAMPLES)[::-1],
        events=[_event_cells(event) for event in evidence.events[-SHOWN_EVENTS:]],
        style=own_file("report.css"),
        script=own_file("curves.js") + own_file("report.js"),
        plotly=PLOTLY_GOES_HERE,
    )
    return redact(text).replace(PLOTLY_GOES_HERE, _plotly(), 1)


def _comparison(figures: Sequence[Figure], against: Evidence) -> dict[str, Any]:
    """The headline of both runs, side by side."""
    others = {figure.name: figure for figure in headline(against, judge_runbooks(against))}
    rows = [(one.name, one.value, others[one.name].value if one.name in others else "") for one in figures]
    return {"name": against.directory.path.name, "rows": rows}


PLOTLY_GOES_HERE = Markup("/* plotly */")


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("tamis.run.handover", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.globals["utc"] = utc
    return environment.get_template("report.html.jinja")


def _subtitle(evidence: Evidence) -> str:
    parts = [str(evidence.info[name]) for name in ("dataset", "attention") if evidence.info.get(name)]
    if count := evidence.info.get("parameters"):
        parts.insert(0, f"{count:,} parameters")
    return "; ".join([*parts, evidence.directory.path.name])


def _chart(chart: Chart, evidence: Evidence, against: Evidence | None) -> dict[str, Any]:
    """Data and layout as plotly takes them; the data is empty when nothing was measured."""
    traces = _traces(chart, evidence)
    if against is not None and chart.is_compared and traces:
        traces += [
            trace | {"name": f"{trace['name']}, {against.directory.path.name}", "line": {"dash": "dot"}}
            for trace in _traces(chart, against)
        ]
    y_axis = {"title": {"text": chart.unit}, "rangemode": "tozero" if chart.from_zero else "normal"}
    layout = {
        "title": {"text": chart.title, "x": 0.02, "font": {"size": 15}},
        "xaxis": {"exponentformat": "SI", "automargin": True},
        "yaxis": y_axis | {"exponentformat": chart.ticks, "automargin": True},
        "showlegend": len(traces) > 1,
        "margin": {"l": 55, "r": 15, "t": 40, "b": 40},
    }
    if chart.over == "step" and traces:
        layout |= _marks(curves.changed_hyperparameters(evidence))
    is_positive = all(y > 0 for trace in traces for y in trace["y"])
    return {"data": traces, "layout": layout, "over": chart.over, "positive": is_positive}


def _traces(chart: Chart, evidence: Evidence) -> list[dict[str, Any]]:
    series = {name: thinned(points, MOST_POINTS) for name, points in chart.series(evidence).items() if points}
    return [
        {"name": name, "x": [x for x, _ in points], "y": [y for _, y in points], "mode": _mode(points)}
        for name, points in series.items()
    ]


def _marks(changes: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Dashed vertical lines where a resume changed hyperparameters, with the change as hover text."""
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dash", "width": 1, "color": "#b3261e"}}
    note = {"yref": "paper", "y": 1, "text": "config", "showarrow": False, "xanchor": "left", "font": {"size": 10}}
    return {
        "shapes": [line | {"x0": step, "x1": step} for step, _ in changes],
        "annotations": [note | {"x": step, "hovertext": html.escape(text)} for step, text in changes],
    }


def _mode(points: Sequence[tuple[float, float]]) -> str:
    return "lines+markers" if len(points) < 30 else "lines"


def _table(title: str, findings: Sequence[Finding]) -> dict[str, Any]:
    return {"title": title, "verdict": verdict(findings), "findings": findings}


def _phase_tables(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        _table(
            f"Phase {record['phase']}: {record['title']}, judged {record['judged_at']}",
            parse_findings(record["findings"]),
        )
        for record in read_go_no_go(evidence.directory)
    ]


def _cost(run: RunDirectory) -> dict[str, list[str]]:
    """The cost of all launches, where a price or a limit was set."""
    spent = read_spent(run)
    return {} if spent is None else {"cost": [str(spent)]}


def _fact(value: Any) -> list[str]:
    """Lines of one value of run.info."""
    if isinstance(value, list):
        return [str(item) for item in value] or ["none"]
    if isinstance(value, int) and not isinstance(value, bool):
        return [f"{value:,}"]
    return ["unknown" if value is None else str(value)]


def _checkpoint_cells(evidence: Evidence, step: int) -> tuple[object, ...]:
    try:
        manifest = read_manifest(evidence.directory.manifest(step))
    except ValueError as error:
        return step, str(error)
    return step, f"{manifest['bytes']:,}", manifest.get("time", ""), manifest["sha256"]


def _evaluation(run: RunDirectory) -> dict[str, Any] | None:
    """The figures of eval.json as lines and rows of cells; None where there is no such file, or an odd one."""
    try:
        results = read_json(run.eval_json)
        tasks = [(name, *(figures[key] for key in EVALUATION_COLUMNS)) for name, figures in results["tasks"].items()]
        step, bits, mean = results["step"], results["bits_per_byte"], results["mean_centred"]
        texts = [(name, text["bits_per_byte"], text["step"]) for name, text in results.get("texts", {}).items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    lines = [f"Step {step}, measured {results.get('time')}, {results.get('precision')} on {results.get('device')}."]
    lines += [] if bits is None else [f"{bits} bits per byte on held-out text."]
    lines += [] if mean is None else [f"Mean of the centred scores: {mean}."]
    lines += [f"{bits} bits per byte on the text {name}, step {step}." for name, bits, step in texts if bits]
    lines += [f"Only the first {limit} examples of each task."] if (limit := results.get("limit")) else []
    return {"lines": lines, "columns": EVALUATION_COLUMNS, "tasks": tasks}


def _event_cells(event: Mapping[str, Any]) -> tuple[object, ...]:
    return utc(event["ts"]), event.get("by"), event.get("event"), event.get("reason")


def own_file(name: str) -> Markup:
    """A file of this folder, as it is."""
    return Markup((resources.files("tamis.run.handover") / name).read_text(encoding="utf-8"))


def script_json(value: Any) -> Markup:
    """JSON that cannot end the script element around it."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")
