"""The comparison behind `python -m tests.gpu.long`, in small on any machine."""

import pytest
import torch

from tests.gpu import long


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(long, "FIRST", 128)


def test_right_attention_passes() -> None:
    row, passed = long.attention_part(300, 2, 1, 16)
    assert passed, row


@pytest.mark.parametrize("wrong", [lambda out: out * 1.02, lambda out: out.roll(1, dims=1)], ids=["scaled", "shifted"])
def test_wrong_attention_fails(monkeypatch: pytest.MonkeyPatch, wrong) -> None:  # type: ignore[no-untyped-def]
    right = long.nsa_attention
    tokens = 300
    monkeypatch.setattr(
        long, "nsa_attention", lambda q, *rest: wrong(out) if (out := right(q, *rest)).shape[1] == tokens else out
    )
    row, passed = long.attention_part(tokens, 2, 1, 16)
    assert not passed, row
