"""Plots of the live screen: colours, round ticks, and the choices of scale and smoothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from textual_plotext import PlotextPlot

from tamis.run.handover.curves import Series, thinned
from tamis.run.monitor.snapshot import Snapshot

MOST_POINTS = 300  # more than a terminal can show
COLOURS = ("cyan", "magenta", "yellow")
TICKS = 5
SMOOTHING = 0.9  # share that each point keeps of the mean before it


@dataclass
class PlotStyle:
    """What the keys change in all plots."""

    log_scale: bool = False
    smooth: bool = False


class Curves(PlotextPlot):
    """One plot of one or more series over the step; the series are named below it, off the curves."""

    def __init__(
        self, title: str, series: Callable[[Snapshot], Series], style: PlotStyle, *, from_zero: bool = False
    ) -> None:
        super().__init__(classes="page curves")
        self.border_title = title
        self._title, self._series, self._style, self._from_zero = title, series, style, from_zero

    def show(self, snapshot: Snapshot) -> None:
        self.plt.clear_data()
        series = {name: thinned(points, MOST_POINTS) for name, points in self._series(snapshot).items() if points}
        positive = all(value > 0 for points in series.values() for _, value in points)
        is_log = self._style.log_scale and positive and not self._from_zero
        self.plt.yscale("log" if is_log and series else "linear")
        self.plt.xlabel("step")
        for (name, points), colour in zip(series.items(), COLOURS, strict=False):
            shown = smoothed(points) if self._style.smooth and name != "validation" else points
            steps, values = zip(*shown, strict=True)
            self.plt.plot(list(steps), list(values), marker="braille", color=colour)
        self._set_ticks([point for points in series.values() for point in points], is_log)
        words = [f"[{colour}]━ {name}[/]" for name, colour in zip(series, COLOURS, strict=False) if len(series) > 1]
        self.border_subtitle = "  ".join(words) if series else "nothing measured yet"
        marks = [word for word, on in (("log scale", is_log), ("smoothed", self._style.smooth)) if on]
        self.border_title = ", ".join([self._title, *marks])
        self.refresh()

    def _set_ticks(self, points: list[tuple[float, float]], is_log: bool) -> None:
        """Label round steps and values; a speed starts at zero."""
        if not points:
            return
        steps, values = zip(*points, strict=True)
        marks = [tick for tick in round_ticks(min(steps), max(steps)) if tick == int(tick)]
        self.plt.xticks(marks, [f"{tick:,.0f}" for tick in marks])
        low, high = 0.0 if self._from_zero else min(values), 1.1 * max(values) if self._from_zero else max(values)
        if not high > low:
            low, high = low - 0.1 * abs(low), low + (0.1 * abs(low) or 1.0)
        self.plt.ylim(low, high)
        marks = [tick for tick in round_ticks(low, high) if tick > 0 or not is_log]
        self.plt.yticks(marks, [f"{tick:,.10g}" for tick in marks])


def smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points with an exponential mean of their values, corrected for its start."""
    mean, weight, result = 0.0, 0.0, []
    for step, value in points:
        mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * value, SMOOTHING * weight + (1 - SMOOTHING)
        result.append((step, mean / weight))
    return result


def round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
