"""Benches without options: small sizes on a CPU, announced, and those of the published tables on a GPU."""

import pytest
import torch

from tamis.bench.sizes import ON_CPU, BenchSizes, default_sizes


def test_the_device_decides_the_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_sizes() == default_sizes("cuda") == default_sizes("auto") == BenchSizes()
    assert capsys.readouterr().err == ""
    assert default_sizes("cpu") == ON_CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_sizes() == default_sizes("auto") == ON_CPU
    assert "first row comes within 30 s" in capsys.readouterr().err
    assert default_sizes("cpu", [256], 512, 0) == ON_CPU
    assert default_sizes("cuda", None) == ON_CPU  # refused by the bench itself
    assert capsys.readouterr().err == ""
    default_sizes("cpu", [256], None)
    assert "small sizes" in capsys.readouterr().err
