"""Which endings lead to a restart, and with which code a launch ends."""

import pytest

from tamis.run.files.events import Alarm
from tamis.run.supervise.restarts import Ending, RestartBudget, true_exit_code

STALL = Alarm("stuck_in_compute", "stall", "no progress")
LEAK = Alarm("loss_too_good", "halt", "a leak")


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5])
def test_endings_that_are_meant_are_passed_on_unchanged(code: int) -> None:
    decision = RestartBudget().decide(Ending(code, furthest_step=10))
    assert (decision.restart, decision.code) == (False, code)


@pytest.mark.parametrize("code", [1, 6, 139, -9, -11])
def test_crashes_and_lost_data_are_tried_again(code: int) -> None:
    assert RestartBudget().decide(Ending(code, furthest_step=10)).restart


def test_data_that_fails_before_the_first_step_is_not_tried_again() -> None:
    decision = RestartBudget(step_at_launch=10).decide(Ending(6, furthest_step=10))
    assert (decision.restart, decision.code) == (False, 6)


def test_data_at_its_end_is_not_retried_and_the_reason_names_what_to_change() -> None:
    ended = "the data ended after 96 samples: raise data.epochs"
    decision = RestartBudget().decide(Ending(6, furthest_step=10, lasting=ended))
    assert (decision.restart, decision.code) == (False, 6)
    assert ended in decision.reason


def test_data_at_its_end_is_not_tried_again_when_the_other_ranks_had_to_be_stopped() -> None:
    decision = RestartBudget().decide(Ending(-9, furthest_step=10, alarm=STALL, lasting="the data ended"))
    assert (decision.restart, decision.code) == (False, 6)


def test_three_restarts_without_progress_are_enough() -> None:
    budget = RestartBudget()
    decisions = [budget.decide(Ending(-9, furthest_step=7)) for _ in range(4)]
    assert [decision.restart for decision in decisions] == [True, True, True, False]
    assert decisions[-1].code == 1 and "no progress beyond step 7" in decisions[-1].reason
    assert decisions[0].delay_s < decisions[1].delay_s < decisions[2].delay_s


@pytest.mark.parametrize(
    ("ending", "delays"),
    [(Ending(-9, 7), (0, 4)), (Ending(1, 7), (2, 4)), (Ending(6, 7), (2, 4)), (Ending(-9, 7, alarm=STALL), (2, 4))],
)
def test_only_the_first_restart_after_a_signal_needs_no_pause(ending: Ending, delays: tuple[int, int]) -> None:
    budget = RestartBudget()
    assert (budget.decide(ending).delay_s, budget.decide(ending).delay_s) == delays


def test_progress_renews_the_patience_but_not_the_budget() -> None:
    budget = RestartBudget(restarts=6)
    decisions = [budget.decide(Ending(1, furthest_step=step)) for step in (5, 5, 5, 9, 9, 20, 30)]
    assert [decision.restart for decision in decisions] == [True] * 6 + [False]
    assert "all 6 restarts are used up" in decisions[-1].reason


def test_a_stall_is_restarted_and_an_anomaly_is_not() -> None:
    assert RestartBudget().decide(Ending(3, 10, alarm=STALL)).restart
    assert RestartBudget().decide(Ending(-9, 10, alarm=STALL)).restart
    decision = RestartBudget().decide(Ending(3, 10, alarm=LEAK))
    assert (decision.restart, decision.code) == (False, 5)


def test_a_run_that_was_done_before_it_stalled_on_the_way_out_is_done() -> None:
    decision = RestartBudget().decide(Ending(0, 10, alarm=STALL))
    assert (decision.restart, decision.code) == (False, 0)
    assert RestartBudget().decide(Ending(0, 10, alarm=LEAK)).code == 5


def test_stalls_without_end_are_an_anomaly() -> None:
    budget = RestartBudget()
    decisions = [budget.decide(Ending(-9, 10, alarm=STALL)) for _ in range(4)]
    assert (decisions[-1].restart, decisions[-1].code) == (False, 5)


@pytest.mark.parametrize(("code", "final"), [(4, 4), (-9, 4), (1, 4), (0, 0), (3, 3), (5, 5)])
def test_a_run_that_was_asked_to_stop_is_not_restarted(code: int, final: int) -> None:
    decision = RestartBudget().decide(Ending(code, 10, term_sent=True))
    assert (decision.restart, decision.code) == (False, final)


@pytest.mark.parametrize(
    ("process", "said", "true"),
    [
        (0, {0: 0, 1: 0}, 0),
        (1, {0: 3, 1: 3}, 3),
        (1, {0: 4, 1: 4}, 4),
        (1, {0: None, 1: 5}, 5),
        (1, {0: 4, 1: 6}, 6),
        (1, {0: 0, 1: None}, 1),
        (1, {0: None, 1: None}, 1),
        (-9, {0: None}, -9),
        (-15, {0: None}, 4),
        (3, {0: 3}, 3),
    ],
)
def test_the_ranks_final_heartbeats_give_the_exit_code_behind_torchruns_one(process: int, said, true: int) -> None:
    assert true_exit_code(process, said) == true
