"""The watchdog's rules on what is learned: losses, gradients, gates, memory."""

import math
import random

import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import HeartbeatWriter
from tamis.run.limits import Limits
from tamis.run.supervise.health_rules import save_alarms
from tamis.run.supervise.watchdog import Watchdog
from tests.run.simulated_run import SimulatedRun

EQUAL = [[1 / 3, 1 / 3, 1 / 3]] * 2


def falling(step: int) -> float:
    return 3.0 + 8.0 * math.exp(-step / 300)


def healthy(step: int) -> dict[str, object]:
    """What a run that learns reports."""
    moved = min(step, 1000) / 5000
    return {
        "loss": falling(step),
        "grad_norm": 0.5 + 3.0 / step,
        "gate_entropy_mean": 1.05 - moved / 2,
        "gate_collapse_fraction": 0.01,
        "gate_shares": [[1 / 3 + moved, 1 / 3, 1 / 3 - moved]] * 2,
        "gate_entropy": [1.05 - moved / 2] * 2,
        "gpu_mem_alloc_gib": 20.0 + 0.3 * (step % 7),
    }


def run_of(steps: int, limits: Limits | None = None, **changes) -> SimulatedRun:
    """A healthy run in which some numbers are given by functions of the step instead."""
    run = SimulatedRun(limits=limits or Limits(loss_floor=1.0))
    for step in range(1, steps + 1):
        run.step(step, 1.0, **(healthy(step) | {name: value(step) for name, value in changes.items()}))
    return run


def test_a_run_that_learns_raises_no_alarm() -> None:
    assert run_of(2500).alarms == []


def test_noise_and_single_spikes_raise_no_alarm() -> None:
    dice = random.Random(3)
    run = run_of(
        1500,
        loss=lambda step: falling(step) + dice.gauss(0, 0.3) + (6.0 if step % 211 == 0 else 0.0),
        grad_norm=lambda step: abs(dice.gauss(1, 0.5)) + (500.0 if step % 97 == 0 else 0.0),
    )
    assert run.alarms == []


def test_a_failed_save_is_an_alarm_at_once_until_one_succeeds() -> None:
    run = SimulatedRun()
    run.beat("checkpoint", 10)
    assert save_alarms(run.history) == []
    run.beat("checkpoint", 10, save_error="Read-only file system: make out writable")
    [alarm] = save_alarms(run.history)
    assert (alarm.kind, alarm.severity) == ("save_failed", "note")
    assert alarm.reason == "the checkpoint of step 10 was not saved: Read-only file system: make out writable"
    run.step(11, 1.0)
    run.beat("checkpoint", 20)
    assert len(save_alarms(run.history)) == 1, "the next save has begun, not succeeded"
    run.step(21, 1.0)
    assert save_alarms(run.history) == []


def test_the_watchdog_reports_a_failed_save_once(tmp_path) -> None:
    run = RunDirectory(tmp_path)
    heartbeat = HeartbeatWriter(run.heartbeat(0), 0)
    watchdog = Watchdog(run, Limits())
    heartbeat.beat("checkpoint", 10, save_error="Disk quota exceeded")
    assert [alarm.kind for alarm in watchdog.look()] == ["save_failed"]
    assert watchdog.look() == []
    heartbeat.close()


def test_a_collapsed_gate_halts() -> None:
    run = run_of(30, gate_entropy_mean=lambda step: 0.9 if step < 20 else 0.05)
    assert run.kinds("halt") == {"gate_collapse"}
    run = run_of(30, gate_collapse_fraction=lambda step: 0.0 if step < 20 else 0.9)
    assert run.kinds("halt") == {"gate_collapse"}


def test_low_entropy_is_noted_before_it_is_a_collapse() -> None:
    run = run_of(30, gate_entropy_mean=lambda step: 0.4)
    assert run.kinds("note") == {"gate_entropy_low"} and run.kinds("halt") == set()


def test_gates_that_stay_where_they_began_never_learned_even_at_full_entropy() -> None:
    run = run_of(1100, gate_shares=lambda step: EQUAL, gate_entropy=lambda step: [math.log(3)] * 2)
    assert run.kinds("halt") == {"gates_never_learn"}


def test_gates_without_numbers_raise_no_alarm() -> None:
    assert run_of(1100, gate_shares=lambda step: [], gate_entropy=lambda step: None).kinds("halt") == set()


def test_gates_that_moved_in_one_layer_have_learned() -> None:
    shares = [[1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25]]
    run = run_of(1500, gate_shares=lambda step: EQUAL if step < 500 else shares, gate_entropy=lambda step: [1.0] * 2)
    assert run.kinds("halt") == set()


def test_a_zero_gradient_halts() -> None:
    assert run_of(30, grad_norm=lambda step: 1.0 if step < 20 else 0.0).kinds("halt") == {"zero_gradient"}


def test_an_exploding_gradient_halts() -> None:
    run = run_of(120, grad_norm=lambda step: 1.0 if step < 100 else 1e4)
    assert run.kinds("halt") == {"exploding_gradient"}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_non_finite_loss_halts_at_once(loss: float) -> None:
    run = run_of(11, loss=lambda step: 3.0 if step < 9 else loss)
    assert run.kinds("halt") == {"non_finite_loss"}


def test_a_loss_below_what_an_honest_model_reaches_halts() -> None:
    """0.12 at step 200: a target that leaks."""
    run = run_of(200, loss=lambda step: max(0.12, 10.8 - step * 0.06))
    assert run.kinds("halt") == {"loss_too_good"}


def test_random_tokens_have_their_own_floor() -> None:
    floor = math.log(257) - 0.1
    honest = run_of(60, Limits(loss_floor=floor), loss=lambda step: 5.6 + 0.03 * math.sin(step))
    assert honest.alarms == []
    leaking = run_of(60, Limits(loss_floor=floor), loss=lambda step: 5.6 - step * 0.02)
    assert leaking.kinds("halt") == {"loss_too_good"}


def test_a_loss_that_rises_and_stays_there_halts() -> None:
    run = run_of(1000, loss=lambda step: falling(step) if step < 700 else 7.5)
    assert run.kinds("halt") == {"loss_diverging"}


def test_growing_memory_is_noted_while_there_is_time() -> None:
    run = run_of(600, gpu_mem_alloc_gib=lambda step: 20.0 + 0.01 * step)
    assert run.kinds("note") == {"memory_creeping"} and run.kinds("halt") == set()
