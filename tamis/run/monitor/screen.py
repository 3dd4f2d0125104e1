"""The live screen of `tamis monitor`: curves and panels, refreshed from the run directory. Reads only.

A wide terminal shows all panels side by side; a narrow one shows one page at a time under the status.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Footer, Static
from textual_plotext import PlotextPlot

from tamis.run.files.console import printable_line
from tamis.run.handover.curves import Series, loss_curves, speed_curve, thinned
from tamis.run.monitor import text as monitor_text
from tamis.run.monitor.snapshot import Snapshot

MOST_POINTS = 300  # more than a terminal can show
STATE_STYLES = {"running": "bold green", "done": "bold green", "crashed": "bold red", "failed": "bold red"}
PAGES = ("curves", "ranks", "gpus", "gates", "log")


class Panel(Static):
    """A titled box of lines made from the snapshot."""

    def __init__(self, title: str, page: str, lines: Callable[[Snapshot], list[str]], when_empty: str) -> None:
        super().__init__(id=title.replace(" ", "-"), classes=f"page {page}", markup=False)
        self.border_title = title
        self._lines, self._when_empty = lines, when_empty

    def show(self, snapshot: Snapshot) -> None:
        lines = [printable_line(line) for line in self._lines(snapshot)]
        self.update("\n".join(lines) if lines else self._when_empty)


class Curves(PlotextPlot):
    """One plot of one or more series over the step."""

    def __init__(self, title: str, series: Callable[[Snapshot], Series], *, from_zero: bool = False) -> None:
        super().__init__(classes="page curves")
        self.border_title = title
        self._series, self._from_zero = series, from_zero

    def show(self, snapshot: Snapshot) -> None:
        self.plt.clear_data()
        series = {name: thinned(points, MOST_POINTS) for name, points in self._series(snapshot).items() if points}
        for name, points in series.items():
            steps, values = zip(*points, strict=True)
            self.plt.plot(list(steps), list(values), label=name if len(series) > 1 else None, marker="braille")
        self._set_scales([point for points in series.values() for point in points])
        self.border_subtitle = "" if series else "nothing measured yet"
        self.refresh()

    def _set_scales(self, points: list[tuple[float, float]]) -> None:
        """Label whole steps, and start the axis of a speed at zero."""
        if not points:
            return
        first, last = min(points)[0], max(points)[0]
        ticks = sorted({first + (last - first) * part // 4 for part in range(5)})
        self.plt.xticks([float(tick) for tick in ticks], [f"{tick:,}" for tick in ticks])
        if self._from_zero:
            self.plt.ylim(0, 1.1 * max(value for _, value in points) or 1.0)


class MonitorScreen(App[None]):
    """The app; `read` returns the next snapshot."""

    CSS = """
    Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #status, #alerts, #events, #samples, #step-time { text-wrap: wrap; }
    #status { height: auto; padding: 0 1; }
    #alerts { height: auto; max-height: 4; padding: 0 1; color: $text-error; }
    #panels { layout: grid; grid-size: 3; grid-rows: 2fr 11 1fr; height: 1fr; }
    #panels > * { border: round $primary; padding: 0 1; height: 100%; }
    .-narrow #panels { grid-size: 1; grid-rows: 1fr; }
    .-narrow.on-curves #panels { grid-size: 2; }
    .-narrow.on-ranks #panels { grid-rows: 1fr 5; }
    .-narrow .page { display: none; }
    .-narrow.on-curves .curves, .-narrow.on-ranks .ranks, .-narrow.on-gpus .gpus, .-narrow.on-gates .gates,
    .-narrow.on-log .log { display: block; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012  textual declares it on the instance
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "page('curves')", "Curves"),
        Binding("2", "page('ranks')", "Ranks"),
        Binding("3", "page('gpus')", "GPUs"),
        Binding("4", "page('gates')", "Gates"),
        Binding("5", "page('log')", "Log"),
        Binding("r", "refresh_now", "Refresh"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, read: Callable[[], Snapshot], *, every_s: float = 2.0) -> None:
        super().__init__()
        self._read, self._every_s = read, every_s

    def compose(self) -> ComposeResult:
        yield Static(id="status", markup=False)
        with Container(id="panels"):
            yield Curves("loss", loss_curves)
            yield Curves("tokens per second", speed_curve, from_zero=True)
            yield Panel("gates by layer", "gates", monitor_text.gate_lines, "no gate statistics yet")
            yield Panel("ranks", "ranks", monitor_text.rank_lines, "no heartbeat yet")
            yield Panel("GPUs", "gpus", monitor_text.gpu_lines, "no GPU on this machine")
            yield Panel("step time", "ranks", monitor_text.time_lines, "no step yet")
            yield Panel("checkpoints", "log", monitor_text.checkpoint_lines, "none yet")
            yield Panel("events", "log", monitor_text.newest_events_first, "none yet")
            yield Panel("samples", "log", monitor_text.continuation_lines, "none yet")
        yield Static(id="alerts", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.title = "tamis monitor"
        self.action_page("curves")
        self.action_refresh_now()
        self.set_interval(self._every_s, self.action_refresh_now)

    def action_page(self, page: str) -> None:
        for name in PAGES:
            self.screen.set_class(name == page, f"on-{name}")

    def action_refresh_now(self) -> None:
        snapshot = self._read()
        self.query_one("#status", Static).update(_status(snapshot))
        self.query_one("#alerts", Static).update("\n".join(map(printable_line, monitor_text.alert_lines(snapshot))))
        for panel in self.query(Panel):
            panel.show(snapshot)
        for curves in self.query(Curves):
            curves.show(snapshot)


def _status(snapshot: Snapshot) -> Text:
    first, *rest = map(printable_line, monitor_text.status_lines(snapshot))
    text = Text(first, style=STATE_STYLES.get(snapshot.state, "bold yellow"))
    for line in rest:
        text.append("\n" + line, style="not bold default")
    return text
