"""The causality test can fail: a model that sees the future, and one whose caches forget, are both found out."""

import pytest

from tamis.attention.layer import NSAAttention
from tamis.config import Config
from tamis.model.decoder import Block
from tamis.train.tools.causality import run_causality_tests
from tests.model.tiny import tiny_config


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tiny_config("runtime.precision=fp32", "runtime.device=cpu")


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_causal_model_passes_and_the_log_records_it(config, attention, tmp_path, capsys) -> None:
    config = tiny_config("runtime.precision=fp32", "runtime.device=cpu", f"model.attention={attention}")
    assert run_causality_tests(config, full=True, reports=tmp_path) == 0
    assert "Causality test: 3/3 passed" in capsys.readouterr().out
    (log,) = tmp_path.glob("causality_*.log")
    assert "Extended tests: 14/14 passed" in log.read_text()


def test_a_model_that_sees_the_next_token_fails(config, tmp_path, monkeypatch, capsys) -> None:
    honest = Block.forward

    def peeks(self, x, branch, *packing):
        out, *rest = honest(self, x, branch, *packing)
        return out + 1e-3 * x.roll(-1, dims=1), *rest

    monkeypatch.setattr(Block, "forward", peeks)
    assert run_causality_tests(config, reports=tmp_path) == 1
    told = capsys.readouterr().out
    assert "FAIL changing the future leaves the past" in told
    assert "FAIL losses of the past have no gradient in the future" in told
    assert "passed – do not train" in told


def test_a_cache_that_forgets_fails_alone(config, tmp_path, monkeypatch, capsys) -> None:
    honest = NSAAttention.attend_token

    def forgets(self, x, cache, positions):
        cache.window.slots_BW2GD.zero_()
        return honest(self, x, cache, positions)

    monkeypatch.setattr(NSAAttention, "attend_token", forgets)
    assert run_causality_tests(config, reports=tmp_path) == 1
    told = capsys.readouterr().out
    assert "FAIL cached decode equals the forward pass" in told
    assert "Causality test: 2/3 passed" in told
