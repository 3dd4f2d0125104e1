"""What the page shows: the state of a run as JSON, and the HTML around it, which loads nothing from elsewhere.

Only the name of the run's folder is shown, not the path to it, which often holds a user's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tamis.run.checks.evidence import Evidence
from tamis.run.cost import read_spent
from tamis.run.eta import duration_text
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import Gpu
from tamis.run.handover.curves import Series, thinned
from tamis.run.handover.report import CHARTS, own_file, script_json
from tamis.run.monitor.command import finite_or_text
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.snapshot import Snapshot, active_directory, read_snapshot
from tamis.run.monitor.text import panel_lines, progress_line, quantity, seconds
from tamis.run.phases import read_go_no_go

PACKAGE = "tamis.run.monitor.web"
MOST_POINTS = 240  # more than a phone shows
SHOWN_OTHERWISE = ("", "alerts")  # panels that the head of the page shows in its own way


def page_state(run_dir: str | Path, files: GrowingFiles, gpus: Sequence[Gpu] | None = None) -> dict[str, Any]:
    """Everything the page shows of a run, as JSON values. The same `files` make later calls cheap."""
    out = RunDirectory(run_dir)
    snapshot = read_snapshot(run_dir, files=files, gpus=gpus)
    panels = {title: lines for title, lines in panel_lines(snapshot).items() if lines and title not in SHOWN_OTHERWISE}
    state = {
        "name": out.path.resolve().name,
        "state": snapshot.state,
        "headline": snapshot.headline,
        "taken_at": snapshot.taken_at,
        "model": _model(snapshot),
        "share": snapshot.step / snapshot.steps if snapshot.steps else 0.0,
        "progress": progress_line(snapshot).partition(" ")[2] if snapshot.steps else "",
        "tiles": [[label, text] for label, text in _tiles(snapshot, out).items() if text],
        "alerts": [[alert.level, alert.text] for alert in snapshot.alerts],
        "charts": _charts(_evidence(snapshot, files)),
        "gates": [[gate.layer, gate.compressed, gate.selected, gate.window] for gate in snapshot.gates],
        "phases": [[f"phase {r['phase']}: {r['title']}", r["verdict"], r["judged_at"]] for r in read_go_no_go(out)],
        "panels": [[title, lines] for title, lines in panels.items()],
    }
    return finite_or_text(state)


def render_page(states: Mapping[str, Any] | None, title: str) -> str:
    """The HTML: with a state, a page of its own; with None, one that follows the server it came from."""
    return _template().render(title=title, state=script_json(states), script=_script())


def _model(snapshot: Snapshot) -> str:
    count = f"{snapshot.parameters / 1e6:.1f}M parameters" if snapshot.parameters else None
    return ", ".join(str(part) for part in (snapshot.model, count, snapshot.dataset) if part)


def _tiles(snapshot: Snapshot, out: RunDirectory) -> dict[str, str | None]:
    """Label → figure, None for what was not measured."""
    last = snapshot.validation[-1] if snapshot.validation else None
    spent = read_spent(out)
    saved = snapshot.checkpoints[-1] if snapshot.checkpoints else None
    copied = snapshot.copies.newest_step if snapshot.copies else None
    return {
        "loss": _number(snapshot.loss, ".4f"),
        "validation loss": f"{last.loss:.4f} at step {last.step}" if last else None,
        "tokens per second": _number(snapshot.toks_per_s, ",.0f"),
        "time left": duration_text(snapshot.progress.eta_s) if snapshot.state == "running" else None,
        "tokens": None if snapshot.progress.tokens_done is None else quantity(snapshot.progress.tokens_done),
        "MFU": _number(snapshot.mfu, ".1%"),
        "step time": None if snapshot.times.step_s is None else seconds(snapshot.times.step_s),
        "gradient norm": _number(snapshot.grad_norm, ".2f"),
        "learning rate": _number(snapshot.lr, ".2e"),
        "checkpoint": f"step {saved.step}" if saved else None,
        "copied": f"step {copied}" if copied is not None else None,
        "cost": str(spent) if spent else None,
    }


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _evidence(snapshot: Snapshot, files: GrowingFiles) -> Evidence:
    """The recent part of the run in the form that the report's curves take."""
    directory = active_directory(RunDirectory(snapshot.run_dir))
    beats, usage = files.beats(directory), files.usage(directory)
    return Evidence(directory, None, {}, snapshot.training, snapshot.validation, beats, [], usage)


def _charts(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {"title": chart.title, "unit": chart.unit, "over": chart.over, "zero": chart.from_zero, "series": series}
        for chart in CHARTS
        if (series := _series(chart.series(evidence)))
    ]


def _series(series: Series) -> list[list[Any]]:
    """Name and points with five digits, which is more than a screen shows."""
    short = {name: thinned(points, MOST_POINTS) for name, points in series.items()}
    return [[name, [[x, float(f"{y:.5g}")] for x, y in points]] for name, points in short.items() if points]


@cache
def _template() -> Any:
    folders = ChoiceLoader([PackageLoader(PACKAGE, "."), PackageLoader("tamis.run.handover", ".")])
    environment = Environment(loader=folders, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("live.html.jinja")


@cache
def _script() -> Markup:
    return own_file("curves.js") + Markup((package_files(PACKAGE) / "live.js").read_text(encoding="utf-8"))
