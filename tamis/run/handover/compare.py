"""`tamis compare`: the loss of several runs by tokens and by training time, as text and as a page. No torch.

Only config.yaml, run.info, training.csv and val.csv are read. The time is that of the steps, from the logged speed:
evaluations, checkpoints and pauses are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.config import Config, ConfigError
from tamis.config.size import parameter_count
from tamis.run.checks.evidence import Evidence, read_evidence
from tamis.run.files.directory import RunDirectory
from tamis.run.files.identity import IDENTITY_KEYS, config_changes
from tamis.run.files.records import write_text_atomic

DATA_KEYS = {*(key for key in IDENTITY_KEYS if key.startswith("data.")), "data.packing"}
WIDTH, HEIGHT = 760.0, 300.0  # of a chart, in pixels
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989")


@dataclass(frozen=True)
class LossCurve:
    """The losses of one run, in nats per token, against tokens and hours; all three grow in step order but the loss."""

    name: str
    parameters: int
    tokens: list[float]
    hours: list[float]
    losses: list[float]

    def loss_at(self, x: float, axis: list[float]) -> float:
        """Return the loss where `axis`, the tokens or hours of this curve, reaches x, between points on a line."""
        after = next((i for i, value in enumerate(axis) if value >= x), len(axis) - 1)
        before = max(0, after - 1)
        if axis[after] <= axis[before]:
            return self.losses[after]
        share = min(1.0, max(0.0, (x - axis[before]) / (axis[after] - axis[before])))
        return self.losses[before] + share * (self.losses[after] - self.losses[before])

    def first_at(self, loss: float) -> tuple[float, float]:
        """Return the tokens and hours at which the loss is first no higher than `loss`."""
        i = next(i for i, value in enumerate(self.losses) if value <= loss)
        if i == 0 or self.losses[i - 1] <= self.losses[i]:
            return self.tokens[i], self.hours[i]
        share = (self.losses[i - 1] - loss) / (self.losses[i - 1] - self.losses[i])
        tokens, hours = (axis[i - 1] + share * (axis[i] - axis[i - 1]) for axis in (self.tokens, self.hours))
        return tokens, hours


@dataclass(frozen=True)
class Difference:
    """A run against the first one: its loss minus the other's, and its tokens and hours divided by the other's."""

    name: str
    tokens: float
    at_equal_tokens: float
    hours: float
    at_equal_hours: float
    loss: float
    tokens_ratio: float
    hours_ratio: float


def compare_runs(runs: Sequence[RunDirectory], any_data: bool = False, page: Path | None = None) -> str:
    """Return the comparison as text, and write it as a page if one is named; the first run is the reference."""
    found = [read_evidence(run) for run in runs]
    if len(found) < 2:
        raise ConfigError("tamis compare needs two runs or more")
    if not any_data:
        _require_same_data(found)
    curves, measured = _curves(found)
    differences = [difference(curves[0], other) for other in curves[1:]]
    text = as_text(curves, differences, measured)
    if page is not None:
        write_text_atomic(page, as_page(curves, text, measured))
    return text


def _require_same_data(found: Sequence[Evidence]) -> None:
    first = _config(found[0])
    for other in found[1:]:
        changes = [change for change in config_changes(first, _config(other)) if change.key in DATA_KEYS]
        if changes:
            raise ConfigError(
                f"{other.directory.path} and {found[0].directory.path} differ in {'; '.join(map(str, changes))}: "
                "their losses measure different things; --any-data compares them all the same"
            )


def _config(evidence: Evidence) -> Config:
    if evidence.config is None:
        raise ConfigError(f"{evidence.directory.path} holds no config.yaml that can be read: name a run's directory")
    return evidence.config


def _curves(found: Sequence[Evidence]) -> tuple[list[LossCurve], str]:
    """Return validation losses, or training losses where a run has fewer than two validations; and which they are."""
    validated = all(len(one.validation) >= 2 for one in found)
    curves = []
    for one in found:
        rows = [(row.step, row.loss) for row in (one.validation if validated else one.training)]
        rows = [(step, loss) for step, loss in rows if math.isfinite(loss)]
        if len(rows) < 2:
            raise ConfigError(f"{one.directory.path} has fewer than two losses: compare it when it has trained longer")
        curves.append(_curve(one, rows))
    return curves, "validation" if validated else "training"


def _curve(evidence: Evidence, rows: list[tuple[int, float]]) -> LossCurve:
    config, clock = _config(evidence), _hours_by_step(evidence)
    per_step = config.tokens_per_step(evidence.processes or 1)
    steps = [step for step, _ in rows]
    return LossCurve(
        name=evidence.directory.path.name,
        parameters=parameter_count(config),
        tokens=[float(step * per_step) for step in steps],
        hours=[_hours_at(clock, step) for step in steps],
        losses=[loss for _, loss in rows],
    )


def _hours_by_step(evidence: Evidence) -> list[tuple[int, float]]:
    """Return logged steps with the hours of training until then, from the speed that was logged with them.

    The first step compiles kernels; it counts as long as the next ones.
    """
    per_step = _config(evidence).tokens_per_step(evidence.processes or 1)
    clock, before, hours = [(0, 0.0)], 0, 0.0
    for row, following in zip(evidence.training, [*evidence.training[1:], *evidence.training[-1:]], strict=True):
        speed = following.toks_per_s if row.step == 1 else row.toks_per_s
        if speed > 0:
            hours += (row.step - before) * per_step / speed / 3600
        before = row.step
        clock.append((row.step, hours))
    return clock


def _hours_at(clock: list[tuple[int, float]], step: int) -> float:
    after = next((i for i, (logged, _) in enumerate(clock) if logged >= step), len(clock) - 1)
    (early, start), (late, end) = clock[max(0, after - 1)], clock[after]
    return end if late <= early else start + (end - start) * min(1.0, (step - early) / (late - early))


def difference(reference: LossCurve, other: LossCurve) -> Difference:
    """Compare where both have been: the last common tokens and hours, and the lower loss that both reached."""
    tokens = min(reference.tokens[-1], other.tokens[-1])
    hours = min(reference.hours[-1], other.hours[-1])
    loss = max(min(reference.losses), min(other.losses))
    (tokens_0, hours_0), (tokens_1, hours_1) = reference.first_at(loss), other.first_at(loss)
    return Difference(
        other.name,
        tokens,
        other.loss_at(tokens, other.tokens) - reference.loss_at(tokens, reference.tokens),
        hours,
        other.loss_at(hours, other.hours) - reference.loss_at(hours, reference.hours),
        loss,
        tokens_1 / tokens_0 if tokens_0 else math.nan,
        hours_1 / hours_0 if hours_0 else math.nan,
    )


def as_text(curves: Sequence[LossCurve], differences: Sequence[Difference], measured: str) -> str:
    width = max(len("run"), *(len(curve.name) for curve in curves))
    lines = [f"{measured} loss in nats per token; hours of training steps alone, the first without its compilation", ""]
    lines.append(f"{'run':<{width}}  parameters   tokens     hours    last loss  lowest")
    lines += [
        f"{one.name:<{width}}  {one.parameters / 1e6:8.1f}M {one.tokens[-1] / 1e6:9.1f}M {one.hours[-1]:8.3g} "
        f"{one.losses[-1]:10.4f} {min(one.losses):8.4f}"
        for one in curves
    ]
    lines += ["", f"against {curves[0].name}:"]
    lines += [
        f"{one.name:<{width}}  {one.at_equal_tokens:+.4f} at {one.tokens / 1e6:.1f}M tokens;  "
        f"{one.at_equal_hours:+.4f} at {one.hours:.3g} hours;  "
        f"loss {one.loss:.4f} with {one.tokens_ratio:.2f} × the tokens, {one.hours_ratio:.2f} × the time"
        for one in differences
    ]
    return "\n".join(lines)


def as_page(curves: Sequence[LossCurve], text: str, measured: str) -> str:
    """Return one HTML page without scripts: both charts, the legend and the text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tamis.run.handover", "."), autoescape=True, undefined=StrictUndefined
    )
    charts = [
        _chart("millions of tokens", curves, [[x / 1e6 for x in one.tokens] for one in curves]),
        _chart("hours of training", curves, [one.hours for one in curves]),
    ]
    names = [(COLOURS[i % len(COLOURS)], one.name) for i, one in enumerate(curves)]
    page = environment.get_template("compare.html.jinja")
    return page.render(charts=charts, names=names, text=text, measured=measured, width=WIDTH, height=HEIGHT)


def _chart(title: str, curves: Sequence[LossCurve], axes: Sequence[list[float]]) -> dict[str, Any]:
    """Return a chart's lines as points of an SVG, with the range of its axes."""
    most = max(axis[-1] for axis in axes) or 1.0
    losses = [loss for one in curves for loss in one.losses]
    low, high = min(losses), max(losses)
    scale = HEIGHT / ((high - low) or 1.0)
    lines = [
        (
            COLOURS[i % len(COLOURS)],
            " ".join(f"{x / most * WIDTH:.1f},{(high - y) * scale:.1f}" for x, y in zip(axis, one.losses, strict=True)),
        )
        for i, (one, axis) in enumerate(zip(curves, axes, strict=True))
    ]
    return {"title": title, "lines": lines, "most": f"{most:,.2f}", "low": f"{low:.3f}", "high": f"{high:.3f}"}
