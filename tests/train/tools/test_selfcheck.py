"""The checks before step 1 pass on the honest model, and fail on one that leaks or on a wrong kernel."""

import pytest
import torch

from tamis.attention.layer import NSAAttention
from tamis.attention.verify import Check
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


def test_training_checks_the_trained_length_and_verify_an_odd_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[int] = []
    monkeypatch.setattr(selfcheck, "why_no_kernels", lambda *_: None)
    monkeypatch.setattr(selfcheck, "model_is_causal", lambda *_: [])
    monkeypatch.setattr(selfcheck, "verify", lambda *_, tokens: proved.append(tokens) or [])
    selfcheck.require_right_attention(tiny(), torch.device("cuda"))
    assert proved == [96]
    selfcheck.selfcheck(tiny(), torch.device("cuda"))
    assert proved == [96, 96, (3 + 5) * 16 + 5]


def test_large_calls_are_checked_where_training_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    monkeypatch.setattr(selfcheck, "why_no_kernels", lambda *_: None)
    monkeypatch.setattr(selfcheck, "verify", lambda *_, tokens: [])
    monkeypatch.setattr(selfcheck, "verify_batch", lambda *shape, tokens: batches.append(shape[-1] * tokens) or [])
    for sequences, found in (("341", []), ("342", [342 * 96])):  # of 96 tokens: just below 32,768, and above
        selfcheck.require_right_attention(tiny(f"train.batch_size={sequences}"), torch.device("cuda"))
        assert batches == found


def test_kernels_of_packed_documents_are_checked_where_training_packs_and_none_where_no_layer_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[str, int, int]] = []
    monkeypatch.setattr(selfcheck, "why_no_kernels", lambda *_: None)
    for name in ("verify", "verify_packed"):
        monkeypatch.setattr(
            selfcheck,
            name,
            lambda *_, tokens, times=1, max_seqlen=0, name=name: called.append((name, times, max_seqlen)) or [],
        )
    selfcheck.require_right_attention(tiny("nsa.layers=window"), torch.device("cuda"))
    assert called == []
    selfcheck.require_right_attention(tiny("data.packing=documents"), torch.device("cuda"))
    assert called == [("verify", 1, 0), ("verify_packed", 1, 96)]
    # Rows of 342 sequences of 96 tokens are large calls, so the packed row of the proof is as long.
    selfcheck.require_right_attention(tiny("data.packing=documents", "train.batch_size=342"), torch.device("cuda"))
    assert called[2:] == [("verify", 1, 0), ("verify_packed", 342, 96)]
