"""Impossible metrics stop a run; single skipped steps of fp16 do not."""

import math

import pytest

from tamis.config import load_config
from tamis.train.guards import Anomaly, Guard

NAN, INF = float("nan"), float("inf")


def guard(*overrides: str, synthetic: bool = False) -> Guard:
    return Guard(load_config(None, list(overrides)), synthetic)


@pytest.mark.parametrize("loss", [NAN, INF])
def test_a_loss_that_is_not_finite_stops_the_run(loss: float) -> None:
    with pytest.raises(Anomaly, match="step 7") as caught:
        guard().check(7, loss, 1.0)
    assert caught.value.kind == "non_finite_loss"


def test_a_gradient_that_is_not_finite_stops_a_bf16_run_at_once() -> None:
    with pytest.raises(Anomaly) as caught:
        guard().check(1, 2.0, INF)
    assert caught.value.kind == "non_finite_gradient"


def test_fp16_may_skip_steps_but_not_twenty_in_a_row() -> None:
    scaled = guard("runtime.precision=fp16")
    for step in range(19):
        scaled.check(step, 2.0, INF)
    scaled.check(19, 2.0, 1.0)  # a good step ends the row
    with pytest.raises(Anomaly):
        for step in range(20):
            scaled.check(step, 2.0, NAN)


def test_a_loss_below_ln_v_on_random_tokens_stops_the_run() -> None:
    floor = math.log(50257)
    honest = guard(synthetic=True)
    honest.check(1, floor - 0.05, 1.0)  # a batch's sampling noise
    with pytest.raises(Anomaly) as caught:
        honest.check(2, floor - 0.5, 1.0)
    assert caught.value.kind == "loss_below_floor"
    assert "the target leaks" in str(caught.value)
    guard(synthetic=False).check(2, floor - 5, 1.0)  # real text can be predicted


def test_a_key_sets_or_lifts_the_lowest_loss_and_memorised_text_is_not_called_a_leak() -> None:
    guard("train.min_loss=0", synthetic=True).check(2, 0.01, 1.0)
    with pytest.raises(Anomaly, match=r"below 0.5000 \(train.min_loss\).*or the model has memorised its data"):
        guard("train.min_loss=0.5").check(2, 0.4, 1.0)
