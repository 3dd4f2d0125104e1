"""The live screen of `tamis monitor`: curves and panels, refreshed from the run directory. Reads only.

A large terminal shows all panels side by side; a small one, or a key, shows one page at a time under the status.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

import psutil
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Footer, Static

from tamis.config.size import GIB
from tamis.run.files.console import printable_line
from tamis.run.handover.curves import loss_curves, speed_curve
from tamis.run.monitor import text as monitor_text
from tamis.run.monitor.listing import last_log_lines
from tamis.run.monitor.plots import Curves, PlotStyle
from tamis.run.monitor.snapshot import Snapshot

WHOLE_WIDTH, WHOLE_HEIGHT = 120, 36  # smallest terminal for all panels
LOG_LINES = 200
STATE_STYLES = {"running": "bold green", "done": "bold green", "crashed": "bold red", "failed": "bold red"}
PAGES = ("curves", "ranks", "gpus", "gates", "events", "log")
HELP = """0        all panels, where the terminal is large enough
1 … 6    one page: curves, ranks, GPUs or machine, gates, events, log
l        logarithmic scale of the loss, or linear
s        smooth the training curves, or show each point
r        refresh now
?        this help, or back
q        quit; the run goes on"""


class Panel(Static):
    """A titled box of lines made from the snapshot."""

    def __init__(self, title: str, page: str, lines: Callable[[Snapshot], list[str]], when_empty: str) -> None:
        super().__init__(id=title.replace(" ", "-"), classes=f"page {page}", markup=False)
        self.border_title = title
        self._lines, self._when_empty = lines, when_empty

    def show(self, snapshot: Snapshot) -> None:
        lines = [printable_line(line) for line in self._lines(snapshot)]
        self.update("\n".join(lines) if lines else self._when_empty)


class MonitorScreen(App[None]):
    """The app; `read` returns the next snapshot."""

    CSS = """
    Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #status, #alerts, #events, #samples, #step-time, #help { text-wrap: wrap; }
    #status { height: auto; padding: 0 1; }
    #alerts { height: auto; max-height: 4; padding: 0 1; color: $text-error; }
    #panels { layout: grid; grid-size: 3; grid-rows: 2fr 11 1fr; height: 1fr; }
    #panels > * { border: round $primary; padding: 0 1; height: 100%; }
    .log { display: none; }
    #help { display: none; padding: 1 2; }
    .paged #panels { grid-size: 1; grid-rows: 1fr; }
    .paged.on-curves #panels { grid-size: 2; }
    .paged.on-ranks #panels { grid-rows: 1fr 5; }
    .paged .page { display: none; }
    .paged.on-curves .curves, .paged.on-ranks .ranks, .paged.on-gpus .gpus, .paged.on-gates .gates,
    .paged.on-events .events, .paged.on-log .log { display: block; }
    .with-help #help { display: block; height: 1fr; }
    .with-help #panels { display: none; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),  # first: a narrow terminal cuts the rest
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("0", "page('')", "All"),
        Binding("1", "page('curves')", "Curves"),
        Binding("2", "page('ranks')", "Ranks"),
        Binding("3", "page('gpus')", "GPUs"),
        Binding("4", "page('gates')", "Gates"),
        Binding("5", "page('events')", "Events"),
        Binding("6", "page('log')", "Log"),
        Binding("l", "change('log_scale')", "Log scale"),
        Binding("s", "change('smooth')", "Smooth"),
        Binding("r", "refresh_now", "Refresh", show=False),
    ]

    def __init__(self, read: Callable[[], Snapshot], *, every_s: float = 2.0) -> None:
        super().__init__()
        self._read, self._every_s = read, every_s
        self._style, self._page = PlotStyle(), ""  # "": all panels, or the curves where they do not fit
        self._snapshot: Snapshot | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="status", markup=False)
        with Container(id="panels"):
            yield Curves("loss", loss_curves, self._style)
            yield Curves("tokens per second", speed_curve, self._style, from_zero=True)
            yield Panel("gates by layer", "gates", monitor_text.gate_lines, "no gate statistics yet")
            yield Panel("ranks", "ranks", monitor_text.rank_lines, "no heartbeat yet")
            yield Panel("GPUs", "gpus", _gpu_or_machine_lines, "no GPU on this machine")
            yield Panel("step time", "ranks", monitor_text.time_lines, "no step yet")
            yield Panel("checkpoints", "events", monitor_text.checkpoint_lines, "none yet")
            yield Panel("events", "events", monitor_text.newest_events_first, "none yet")
            yield Panel("samples", "events", monitor_text.continuation_lines, "none yet")
            yield Panel("log", "log", _newest_log_lines_first, "no log yet")
        yield Static(HELP, id="help", markup=False)
        yield Static(id="alerts", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.title = "tamis monitor"
        self.action_refresh_now()
        self.set_interval(self._every_s, self.action_refresh_now)

    def on_resize(self) -> None:
        self._lay_out()

    def action_page(self, page: str) -> None:
        self._page = page
        self.screen.remove_class("with-help")
        self._lay_out()
        self._show()

    def action_help(self) -> None:
        self.screen.toggle_class("with-help")

    def action_change(self, name: str) -> None:
        setattr(self._style, name, not getattr(self._style, name))
        self._show()

    def _lay_out(self) -> None:
        """Show one page if it was chosen, or if the terminal is too small for all panels in either direction."""
        is_small = self.size.width < WHOLE_WIDTH or self.size.height < WHOLE_HEIGHT
        self.screen.set_class(is_small or bool(self._page), "paged")
        for name in PAGES:
            self.screen.set_class(name == (self._page or PAGES[0]), f"on-{name}")

    def action_refresh_now(self) -> None:
        self._snapshot = self._read()
        self._show()

    def _show(self) -> None:
        if (snapshot := self._snapshot) is None:
            return
        self.query_one("#status", Static).update(_status(snapshot))
        self.query_one("#alerts", Static).update("\n".join(map(printable_line, monitor_text.alert_lines(snapshot))))
        for panel in self.query(Panel):
            panel.show(snapshot)
        for curves in self.query(Curves):
            curves.show(snapshot)


def _gpu_or_machine_lines(snapshot: Snapshot) -> list[str]:
    """The GPUs, or CPU and memory of this machine where there is none."""
    if snapshot.gpus:
        return monitor_text.gpu_lines(snapshot)
    memory, cores = psutil.virtual_memory(), psutil.cpu_count() or 1
    busy = psutil.cpu_percent()  # since the last call
    used, total = (memory.total - memory.available) / GIB, memory.total / GIB
    return [
        "no GPU on this machine",
        f"CPU     {monitor_text.bar(busy / 100, 10)} {busy:.0f}% of {cores} cores",
        f"memory  {monitor_text.bar(used / total, 10)} {used:.1f}/{total:.1f} GiB",
        f"load    {os.getloadavg()[0]:.1f} in the last minute",
    ]


def _newest_log_lines_first(snapshot: Snapshot) -> list[str]:
    return last_log_lines(snapshot.run_dir, LOG_LINES)[::-1]


def _status(snapshot: Snapshot) -> Text:
    first, *rest = map(printable_line, monitor_text.status_lines(snapshot))
    text = Text(first, style=STATE_STYLES.get(snapshot.state, "bold yellow"))
    for line in rest:
        text.append("\n" + line, style="not bold default")
    return text
