"""The checks before step 1 pass on the honest model, and fail on one that leaks or on a wrong kernel."""

import pytest
import torch

from tamis.attention.agreement import Check
from tamis.attention.layer import NSAAttention
from tamis.config import load_config
from tamis.train.guards import Anomaly
from tamis.train.tools import selfcheck

CPU = torch.device("cpu")


def tiny(*overrides: str):
    keys = ["model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.d_k=16", "model.d_ff=32", "train.seq_len=96"]
    keys += ["nsa.l=8", "nsa.d=4", "nsa.l_sel=16", "nsa.n_sel=3", "nsa.w=16", "runtime.precision=fp32"]
    return load_config(None, [*keys, "data.tokenizer=byte", *overrides])


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_causal_model_passes(attention: str) -> None:
    results = selfcheck.selfcheck(tiny(f"model.attention={attention}"), CPU)
    assert [r.name for r in results] == ["causality", "loss on random tokens is not below ln V"]
    assert all(r.passed for r in results)


def test_a_layer_that_sees_one_token_ahead_fails_causality(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NSAAttention.with_gates

    def leaking(self, x, cu_seqlens=None):
        out, gates = honest(self, x, cu_seqlens)
        return out + x.roll(-1, dims=1), gates

    monkeypatch.setattr(NSAAttention, "with_gates", leaking)
    causality, _ = selfcheck.model_is_causal(tiny(), CPU)
    assert not causality.passed and causality.measured > 0


def test_a_model_that_ignores_its_input_does_not_pass_as_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck.Decoder, "forward", lambda self, tokens, *_: (torch.zeros(*tokens.shape, 32), None))
    causality, _ = selfcheck.model_is_causal(tiny(), CPU)
    assert not causality.passed


def test_a_kernel_that_disagrees_stops_training_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "why_no_kernels", lambda *_: None)  # as on a GPU the kernels serve
    monkeypatch.setattr(selfcheck, "verify", lambda *_, **__: [Check("selected dq", float("nan"), 5e-3)])
    with pytest.raises(Anomaly, match="selected dq") as caught:
        selfcheck.require_right_attention(tiny(), torch.device("cuda"))
    assert caught.value.kind == "attention_mismatch"


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The comparisons that are made: name, sequences or repetitions, tokens of each."""
    called: list[tuple[str, int, int]] = []

    def packed(*_, tokens, times, max_seqlen):
        assert max_seqlen in (96, 192, 65536)
        return called.append(("packed", times, tokens)) or []

    def whole(*shape, tokens, packed, max_seqlen=None):
        assert max_seqlen in (None, 96, 192)
        return called.append(("row" if packed else "batch", shape[-1], tokens)) or []

    monkeypatch.setattr(selfcheck, "why_no_kernels", lambda *_: None)
    monkeypatch.setattr(selfcheck, "model_is_causal", lambda *_: [])
    monkeypatch.setattr(selfcheck, "verify", lambda *_, tokens: called.append(("one", 1, tokens)) or [])
    monkeypatch.setattr(selfcheck, "verify_batch", whole)
    monkeypatch.setattr(selfcheck, "verify_packed", packed)
    return called


ODD = (3 + 5) * 16 + 5


@pytest.mark.parametrize(
    ("overrides", "before_training", "by_verify"),
    [
        ([], [("one", 1, 96)], [("one", 1, ODD)]),
        (["train.batch_size=4"], [("one", 1, 96), ("batch", 4, 96)], [("one", 1, ODD), ("batch", 3, ODD)]),
        (
            ["train.batch_size=4", "train.length_schedule=[16,32,32,96]"],  # 16 is too short for a proof
            [("one", 1, 96), ("batch", 4, 96), ("batch", 12, 32)],
            [("one", 1, ODD), ("batch", 3, ODD)],
        ),
        (
            ["train.seq_len=192", "train.length_schedule=[96,192]", "data.packing=documents"],
            [("one", 1, 192), ("packed", 1, 192), ("row", 2, 96)],
            [("one", 1, ODD), ("packed", 2, ODD)],
        ),
        (["train.seq_len=16"], [("one", 1, 24)], [("one", 1, ODD)]),
        (["train.seq_len=65536"], [("one", 1, 256), ("batch", 1, 65536)], [("one", 1, ODD), ("batch", 493, ODD)]),
        (
            ["train.batch_size=4", "data.packing=documents"],
            [("one", 1, 96), ("packed", 4, 96)],
            [("one", 1, ODD), ("packed", 3, ODD)],
        ),
        (
            ["train.seq_len=65536", "data.packing=documents"],
            [("one", 1, 256), ("packed", 256, 256), ("row", 1, 65536)],
            [("one", 1, ODD), ("packed", 493, ODD)],
        ),
        (["nsa.layers=window"], [], []),
    ],
    ids=[
        "one sequence",
        "several",
        "rising",
        "rising and packed",
        "short",
        "long",
        "packed",
        "long and packed",
        "none",
    ],
)
def test_kernels_are_proved_on_a_micro_batch_as_they_train_and_by_verify_at_an_odd_length_too(
    overrides: list[str], before_training: list, by_verify: list, proved: list
) -> None:
    selfcheck.require_right_attention(tiny(*overrides), torch.device("cuda"))
    assert proved == before_training
    proved.clear()
    selfcheck.selfcheck(tiny(*overrides), torch.device("cuda"))
    assert proved == before_training + by_verify
