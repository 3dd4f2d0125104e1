"""The watchdog's rules on progress: what is a stall, whose fault it is, and what must not alarm."""

import math
import random

import pytest

from tamis.config import build_config
from tamis.run.limits import Limits, limits_for
from tamis.run.supervise.history import RunHistory
from tamis.run.supervise.stall_rules import patience, stall_alarms
from tests.run.simulated_run import SimulatedRun


def stalled_after(run: SimulatedRun, seconds: float) -> str:
    """Wait, and return the kind of the only alarm that stops the run."""
    run.wait(seconds)
    (kind,) = run.kinds("stall")
    return kind


def test_a_steady_run_raises_no_alarm_and_a_silent_one_does_after_the_learned_limit() -> None:
    run = SimulatedRun()
    run.steps(1, 50, seconds=10.0)
    assert run.alarms == []
    run.beat("step_start", 51)
    run.beat("progress", 51)
    run.wait(195)
    assert run.alarms == []  # 20 steps of 10 s
    assert stalled_after(run, 10) == "stuck_in_compute"


def test_fast_steps_are_given_the_floor() -> None:
    run = SimulatedRun(limits=Limits(floor_s=120))
    run.steps(1, 100, seconds=0.01)
    run.beat("progress", 101)
    run.wait(119)
    assert run.alarms == []
    assert stalled_after(run, 3) == "stuck_in_compute"


def test_one_step_as_long_as_thirty_minutes_is_waited_for_thrice() -> None:
    """The slow healthy runs that earlier watchdogs killed."""
    run = SimulatedRun()
    run.steps(1, 3, seconds=1700.0)
    run.beat("progress", 4)
    run.wait(3 * 1700 - 100)
    assert run.alarms == []


@pytest.mark.parametrize("pattern", ["random", "regimes", "waves", "spikes"])
def test_no_false_alarm_in_hours_of_step_times_varying_tenfold(pattern: str) -> None:
    dice = random.Random(7)
    run = SimulatedRun(ranks=2)
    begin = run.monotonic
    step = 0
    while run.monotonic - begin < 2 * 3600:
        step += 1
        minutes = (run.monotonic - begin) / 60
        factor = {
            "random": 10 ** dice.random(),
            "regimes": 10.0 if int(minutes) % 20 >= 12 else 1.0,
            "waves": 10 ** (0.5 + 0.5 * math.sin(minutes)),
            "spikes": 10.0 if step % 50 == 0 else 1.0,
        }[pattern]
        run.step(step, 0.5 * factor)
        if step % 400 == 0:
            run.beat("eval", step)
            run.wait(90)
            run.beat("checkpoint", step, ranks=[0])
            run.wait(200)  # rank 1 waits meanwhile, past its own limit
    assert run.kinds("stall") | run.kinds("halt") == set()


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_wall_clock_jump_of_an_hour_is_nothing(jump: float) -> None:
    run = SimulatedRun()
    run.steps(1, 30)
    run.wall_offset += jump
    run.steps(31, 60)
    assert run.alarms == []


def test_a_machine_that_slept_for_an_hour_is_not_taken_for_a_silent_run() -> None:
    run = SimulatedRun()
    run.steps(1, 30)
    run.monotonic += 3600  # the machine slept: neither the trainer nor the watchdog ran
    run._next_look = run.monotonic
    run.wait(5)
    run.steps(31, 40)
    assert run.alarms == []


@pytest.mark.parametrize(
    ("phase", "silence_s"),
    [("boot", 800), ("loader_ready", 800), ("compile", 3500), ("eval", 800), ("checkpoint", 1700)],
)
def test_slow_phases_have_their_own_patience(phase, silence_s: float) -> None:
    run = SimulatedRun()
    if phase in ("eval", "checkpoint"):
        run.steps(1, 20, seconds=0.1)
    run.beat(phase, 20)
    run.wait(silence_s)
    assert run.alarms == []
    assert stalled_after(run, 200) == ("starved_of_data" if phase == "loader_ready" else f"stuck_in_{phase}")


def test_the_first_step_may_compile_for_long_but_not_forever() -> None:
    run = SimulatedRun()
    run.beat("step_start", 1)
    run.beat("progress", 1)
    run.wait(1700)
    assert run.alarms == []
    assert stalled_after(run, 200) == "stuck_in_compute"


def test_a_worker_that_never_sends_a_heartbeat_is_noticed() -> None:
    run = SimulatedRun()
    assert stalled_after(run, 1000) == "stuck_at_start"


def test_a_repeated_beat_is_no_progress() -> None:
    run = SimulatedRun()
    run.steps(1, 10)
    for _ in range(200):
        run.beat("progress", 11)
        run.wait(1)
    assert run.kinds("stall") == {"stuck_in_compute"}


def test_waiting_for_data_is_distinguished_from_computing() -> None:
    run = SimulatedRun(ranks=2)
    run.steps(1, 10)
    run.beat("step_start", 11)
    run.beat("progress", 11, ranks=[0])
    assert stalled_after(run, 300) == "starved_of_data"
    assert run.alarms[0].rank == 1 and "rank 1 waits for the batch of step 11" in run.alarms[0].reason


def test_all_ranks_inside_the_same_step_are_stuck_in_a_collective() -> None:
    run = SimulatedRun(ranks=4)
    run.steps(1, 10)
    run.beat("step_start", 11)
    run.beat("progress", 11)
    assert stalled_after(run, 200) == "stuck_in_collective"
    assert run.alarms[0].evidence["ranks"]["3"]["phase"] == "progress"


def test_a_stopped_rank_is_named() -> None:
    run = SimulatedRun(ranks=2)
    run.steps(1, 10)
    run.beat("progress", 11)
    run.processes[1] = "stopped"
    assert stalled_after(run, 200) == "stopped_rank"
    assert "rank 1 is stopped" in run.alarms[0].reason


def test_a_stopped_process_is_reported_within_fifteen_seconds() -> None:
    run = SimulatedRun(ranks=2)
    run.steps(1, 10)
    run.beat("progress", 11)
    run.processes[1] = "stopped"
    run.wait(15)
    assert run.kinds("note") == {"stopped_rank"} and "kill -CONT" in run.alarms[0].reason


def test_short_regular_steps_stall_after_thirty_seconds() -> None:
    run = SimulatedRun()
    run.steps(1, 200, seconds=0.2)
    run.beat("progress", 201)
    assert stalled_after(run, 31) == "stuck_in_compute"
    recent = SimulatedRun()
    recent.steps(1, 50, seconds=0.2)
    recent.beat("progress", 51)
    recent.wait(100)  # too few steps to know the longest one
    after_eval = SimulatedRun()
    after_eval.steps(1, 200, seconds=0.2)
    after_eval.beat("eval", 200)
    after_eval.beat("progress", 201)
    after_eval.wait(100)  # code may be compiled after an evaluation
    assert recent.alarms == after_eval.alarms == []


def test_a_run_that_is_slow_from_its_start_is_seen() -> None:
    run = SimulatedRun(limits=Limits(expected_step_s=0.5))
    run.steps(1, 80, seconds=3.0)
    assert run.kinds("note") == {"slow"}
    restarted = SimulatedRun()
    restarted.steps(1, 600, seconds=0.5)
    restarted.history.restart(1)
    restarted.pid = 200
    restarted.steps(601, 625, seconds=10.0)
    assert "throughput_collapse" in restarted.kinds("stall")


def test_after_a_restart_for_a_collapse_the_new_process_is_judged_by_its_own_steps() -> None:
    run = SimulatedRun()
    run.steps(1, 600, seconds=1.0)
    run.steps(601, 630, seconds=20.0)
    assert "throughput_collapse" in run.kinds("stall")
    run.alarms.clear()
    run.history.restart(1)
    run.pid = 200
    run.steps(631, 900, seconds=1.0)
    assert run.alarms == []


def test_a_dead_rank_is_noticed_at_once_and_blamed_alone() -> None:
    run = SimulatedRun(ranks=3)
    run.steps(1, 10)
    run.beat("progress", 11)
    run.processes[2] = "dead"
    assert stalled_after(run, 5) == "dead_rank"
    assert {alarm.rank for alarm in run.alarms} == {2}


def test_a_process_that_ends_in_a_long_step_is_left_to_its_parent_for_a_moment() -> None:
    run = SimulatedRun()
    run.steps(1, 10, seconds=30.0)
    run.beat("progress", 11)
    run.wait(20)
    run.processes[0] = "dead"
    run.wait(2)
    assert run.alarms == []
    assert stalled_after(run, 3) == "dead_rank"


def test_a_rank_that_ended_properly_is_not_dead() -> None:
    run = SimulatedRun()
    run.steps(1, 10)
    run.beat("done", 10, exit_code=0)
    run.processes[0] = "dead"
    run.wait(60)
    assert run.alarms == []


def test_throughput_collapse_restarts_the_run_and_mere_slowness_is_only_reported() -> None:
    run = SimulatedRun()
    run.steps(1, 1000, seconds=1.0)
    run.steps(1001, 1100, seconds=6.0)
    assert run.kinds() == {"slow"} and run.kinds("note") == {"slow"}
    run.steps(1101, 1125, seconds=18.0)
    assert "throughput_collapse" in run.kinds("stall")


def test_a_short_pause_between_fast_steps_is_no_collapse() -> None:
    run = SimulatedRun()
    run.steps(1, 3000, seconds=0.2)
    run.steps(3001, 3010, seconds=5.0)
    run.steps(3011, 3300, seconds=0.2)
    assert run.alarms == []


@pytest.mark.parametrize("field", ["dt_fetch_s", "dt_forward_s"])
def test_a_slow_rank_is_named_after_twenty_steps_and_not_killed(field: str) -> None:
    run = SimulatedRun(ranks=4)

    def steps(first: int, last: int) -> None:
        for step in range(first, last + 1):
            run.beat("step_start", step)
            run.wait(1.0)
            for rank in range(4):
                run.beat("step_end", step, ranks=[rank], **{field: 0.8 if rank == 2 else 0.1})

    steps(1, 19)
    run.wait(2.0)
    assert run.alarms == []  # the first steps of a busy machine say little
    steps(20, 60)
    slow = [alarm for alarm in run.alarms if alarm.kind == "slow_rank"]
    assert slow and {alarm.rank for alarm in slow} == {2}
    assert run.kinds("stall") | run.kinds("halt") == set()


def test_a_run_that_mostly_waits_for_data_gets_a_note() -> None:
    run = SimulatedRun()
    run.steps(1, 40, seconds=1.0, dt_fetch_s=0.7)
    assert run.kinds() == {"starved_of_data"} and run.kinds("note") == run.kinds()
    assert "70%" in run.alarms[-1].reason


def test_silence_on_a_full_disk_proves_nothing() -> None:
    history = RunHistory(expected_ranks=1)
    for second in range(0, 4000, 10):
        history.tick(float(second))
    (alarm,) = stall_alarms(history, {0: "running"}, Limits(), disk_is_full=True)
    assert (alarm.kind, alarm.severity) == ("disk_full", "note")


def test_after_a_restart_the_patience_of_a_beginning_is_given_again() -> None:
    run = SimulatedRun()
    run.steps(1, 50, seconds=0.1)
    run.wait(100)
    run.history.restart(1)
    run.pid = 200
    run.beat("boot", 0)
    run.wait(500)
    run.beat("step_start", 41)
    run.beat("progress", 41)
    run.wait(900)
    assert run.alarms == []
    assert patience(run.history.ranks[0], run.limits) == run.limits.first_step_s


def test_ranks_of_an_earlier_larger_run_are_not_waited_for() -> None:
    run = SimulatedRun(ranks=8)
    run.steps(1, 20)
    run.history.restart(2)
    run.processes = {0: "running", 1: "running"}
    run.pid = 300
    run.steps(21, 400)
    assert run.alarms == [] and set(run.history.ranks) == {0, 1}


def test_a_watchdog_that_comes_later_forgets_them_too() -> None:
    run = SimulatedRun(ranks=8)
    run.steps(1, 20)
    run.monotonic += 3600
    run.pid = 300
    run.beat("boot", 0, ranks=[0, 1])
    run.history.forget_former_ranks()
    assert set(run.history.ranks) == {0, 1}


def test_the_limits_follow_the_config() -> None:
    synthetic = build_config({"data": {"dataset": "synthetic"}})
    assert limits_for(synthetic).loss_floor == pytest.approx(math.log(50257) - 0.1)
    patient = build_config({"data": {"loader_timeout_s": 1000.0}})
    assert limits_for(patient).fetch_s == 1060
