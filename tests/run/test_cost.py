"""A run ends at its cost limit with a checkpoint and exit code 7, whatever it is doing; the sums survive launches."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tamis.config import Config, ConfigError, build_config
from tamis.run.checks.evidence import read_evidence
from tamis.run.cost import CostMeter, Spent, cost_banner, read_spent
from tamis.run.eta import TokenProgress
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, read_events
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.handover.report import report_page
from tamis.run.limits import Grace
from tamis.run.monitor.ranks import RankView
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import status_lines
from tamis.run.supervise.restarts import Ending, RestartBudget
from tamis.run.supervise.supervisor import LaunchOptions, supervise
from tests.faults.launched import fake_command, tiny_config


def priced(out: Path, **cost: object) -> Config:
    return build_config(tiny_config(out).model_dump() | {"cost": {"per_hour": 2.0, **cost}})


class MeterThatRunsOut(CostMeter):
    """Jumps to the limit as soon as a condition holds, so that no test depends on the speed of the machine."""

    def __init__(self, config: Config, run: RunDirectory, is_spent: Callable[[], bool]) -> None:
        super().__init__(config, run)
        self.is_spent = is_spent

    def spent(self) -> Spent:
        return Spent(50.0, 100.0, 2.0) if self.is_spent() else super().spent()


def run_until(config: Config, is_spent: Callable[[RunDirectory], bool], delay_s: float = 0.05) -> tuple[int, list[str]]:
    """Supervise the trainer without a model; returns the exit code and the names of the events."""
    run = RunDirectory(config.train.out_dir).create()
    meter = MeterThatRunsOut(config, run, lambda: is_spent(run))
    grace = Grace(cost_s=60.0 if delay_s else 0.2, term_s=0.5)
    options = LaunchOptions(command=fake_command, look_every_s=0.05, meter=meter, grace=grace)
    options = replace(options, budget=RestartBudget(first_delay_s=delay_s or 0.05))
    code = supervise(config, options=options)
    return code, [event["event"] for event in read_events(run)]


def has_beat(phase: str, step: int) -> Callable[[RunDirectory], bool]:
    return lambda run: any((b.phase, b.step) == (phase, step) for b in read_heartbeats(run.heartbeat(0), tail=20))


@pytest.mark.parametrize(("fault", "phase"), [("hang_in_save", "checkpoint"), ("hang_in_eval", "eval")])
def test_a_save_or_an_evaluation_is_finished_before_the_run_ends(tmp_path, monkeypatch, fault: str, phase: str) -> None:
    monkeypatch.setenv("FAKE_FAULT", json.dumps({"kind": fault, "step": 10, "seconds": 0.5}))
    config = priced(tmp_path / "out", max=100.0)
    code, events = run_until(config, has_beat(phase, 10))
    run = RunDirectory(tmp_path / "out")
    assert code == 7 and events == ["start", "cost_limit", "end"]
    assert (latest_valid_checkpoint(run) or 0) >= 10 and not run.halt.exists()
    assert "cost.max=100 is reached (100.00 $ for 2 d 02:00 at 2.00 $ an hour)" in read_events(run)[-1]["reason"]


def test_a_pause_before_a_restart_ends_at_the_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", '{"kind": "crash", "step": 7}')

    def has_crashed(run: RunDirectory) -> bool:
        return any(event["event"] == "restart" for event in read_events(run))

    code, events = run_until(priced(tmp_path / "out", max=100.0), has_crashed, delay_s=100_000.0)
    assert code == 7 and events == ["start", "restart", "end"]


def test_a_worker_that_is_stuck_at_the_limit_is_ended_by_force(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", '{"kind": "hang_in_compute", "step": 7}')
    code, events = run_until(priced(tmp_path / "out", max=100.0), has_beat("progress", 7), delay_s=0.0)
    assert code == 7 and events == ["start", "cost_limit", "term", "kill", "end"]
    assert not RunDirectory(tmp_path / "out").halt.exists()


def test_the_hours_of_all_launches_count_and_a_new_launch_needs_a_higher_limit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "out").create()
    run.cost_json.write_text('{"hours": 10.0, "cost": 15.0, "per_hour": 1.5}')
    options = LaunchOptions(command=lambda *_: ["false"])
    assert supervise(priced(tmp_path / "out", max_hours=10.0), options=options) == 7
    assert [event["event"] for event in read_events(run)] == ["end"]
    assert "cost.max_hours=10 is reached" in read_events(run)[0]["reason"]
    spent = read_spent(run)
    assert spent is not None and 10.0 < spent.hours < 11.0 and 15.0 < spent.cost < 17.0 and spent.per_hour == 2.0


@pytest.mark.parametrize("text", ["", "[]", '{"hours": -1, "cost": 0, "per_hour": 0}', '{"hours": "x"}', "null"])
def test_sums_that_cannot_be_read_count_as_none(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.cost_json.write_text(text)
    assert read_spent(run) is None and CostMeter(priced(tmp_path), run).spent().hours < 1


def test_a_run_without_a_price_or_limit_writes_nothing(tmp_path: Path) -> None:
    meter = CostMeter(tiny_config(tmp_path), RunDirectory(tmp_path))
    assert meter.limit_reached() is None
    meter.save()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 7), (2, 2), (3, 7), (4, 7), (5, 5), (6, 7), (-9, 7)])
def test_how_an_attempt_ends_at_the_limit(code: int, expected: int) -> None:
    ending = Ending(code, furthest_step=10, term_sent=True, cost_limit="cost.max=1 is reached")
    decision = RestartBudget().decide(ending)
    assert (decision.restart, decision.code) == (False, expected)
    leak = replace(ending, alarm=Alarm("loss_too_good", "halt", "a leak"))
    assert RestartBudget().decide(leak).code in (2, 5)


def test_a_limit_on_cost_needs_a_price() -> None:
    with pytest.raises(ConfigError, match=r"cost\.max needs cost\.per_hour"):
        build_config({"cost": {"max": 10.0}})


def test_the_monitor_shows_the_cost_so_far_in_all_and_after_the_end(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.cost_json.write_text('{"hours": 1.5, "cost": 3.0, "per_hour": 2.0}')
    snapshot = read_snapshot(tmp_path, gpus=[])
    assert snapshot.cost == Spent(1.5, 3.0, 2.0)
    running = replace(snapshot, state="running", progress=TokenProgress(eta_s=7200.0))
    assert status_lines(running)[-1] == "cost 3.00 $ for 1:30:00 at 2.00 $ an hour so far, about 7.00 $ in all"
    rank = RankView(0, 1, 10, "done", 3 * 3600.0, False, None, None, None)
    ended = status_lines(replace(snapshot, state="done", ranks=[rank]))[-1]
    assert ended.endswith("so far; ended 3:00:00 ago: 6.00 $ more if the machine still runs")
    assert "3.00 $ for 1:30:00" in report_page(read_evidence(run), {})


def test_the_banner_states_price_limits_and_what_was_spent(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.cost_json.write_text('{"hours": 1.0, "cost": 2.0, "per_hour": 2.0}')
    config = priced(tmp_path, max=20.0, max_hours=9.0)
    words = "cost: 2.00 $ an hour, limits: max=20, max_hours=9; spent before: 2.00 $ for 1:00:00 at 2.00 $ an hour"
    assert cost_banner(config, CostMeter(config, run)) == words
    assert cost_banner(tiny_config(tmp_path), CostMeter(config, run)) is None
