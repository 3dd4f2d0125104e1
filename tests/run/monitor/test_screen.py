"""Keys, pages, ticks and events of the live screen."""

from __future__ import annotations

import asyncio

import pytest

from tamis.run.files.heartbeat import HeartbeatWriter
from tamis.run.monitor.plots import Curves, round_ticks
from tamis.run.monitor.screen import MonitorScreen, Panel
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import newest_events_first
from tests.run.monitor.test_monitor import live


def test_keys_change_scale_and_smoothing_and_show_pages_and_help_at_every_width(tmp_path):
    run = live(tmp_path)
    run.train_log.write_text("a line of the log\x1b[31m\n")

    async def look() -> tuple[str, list[str], str, bool, str]:
        app = MonitorScreen(lambda: read_snapshot(tmp_path, gpus=[]), every_s=3600)
        async with app.run_test(size=(160, 50)) as pilot:
            plot = app.query(Curves).first()
            await pilot.press("l", "s")
            title = str(plot.border_title)
            await pilot.press("6")
            await pilot.pause()
            shown = [str(w.border_title) for w in [*app.query(Panel), *app.query(Curves)] if w.display and w.region]
            log = str(app.query_one("#log", Panel).render())
            await pilot.press("question_mark")
            await pilot.pause()
            return title, shown, log, app.query_one("#help").display, str(app.query_one("#GPUs", Panel).render())

    title, shown, log, has_help, machine = asyncio.run(look())
    assert title == "loss, log scale, smoothed"
    assert shown == ["log"] and log.startswith("a line of the log") and "\x1b" not in log
    assert has_help
    assert "CPU" in machine and "memory" in machine


def test_saves_and_evaluations_are_events(tmp_path):
    run = live(tmp_path)
    writer = HeartbeatWriter(run.heartbeat(0), 0)
    writer.beat("eval", 7)
    writer.beat("checkpoint", 8)
    lines = newest_events_first(read_snapshot(tmp_path, gpus=[]))
    assert lines[0].endswith("trainer save: at step 8")
    assert lines[1].endswith("trainer evaluation: at step 7")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 150, [0, 50, 100, 150]), (1.93, 5.6, [2, 3, 4, 5]), (1, 1, [1]), (0.001, 0.0021, [0.001, 0.0015, 0.002])],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert round_ticks(low, high) == pytest.approx(ticks)
