"""The estimate: the comparison of NSA with dense attention is the one that was measured, and the price follows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tamis.config import load_config
from tamis.train.tools import estimate
from tamis.train.tools.estimate import NSA_OVER_DENSE, compared_with_dense, run_estimate

MEASURED = Path(__file__).parents[3] / "docs" / "data" / "train.json"


def test_the_table_holds_the_published_measurements() -> None:
    measured = [row for row in json.loads(MEASURED.read_text())["rows"] if "layers" not in row]
    rows = {(row["length"], row["attention"]): row["toks_per_s"] for row in measured}
    lengths = sorted({length for length, _ in rows})
    ratios = {length: rows[length, "nsa"] / rows[length, "dense"] for length in lengths}
    assert pytest.approx(ratios, abs=0.006) == NSA_OVER_DENSE


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (2048, f"dense is faster, NSA about {NSA_OVER_DENSE[2048]:.2f} times as fast; model.attention=dense"),
        (8192, "at 8,192 tokens NSA is faster, about 1.1 times as fast"),
        (32768, "at 32,768 tokens NSA is faster, about 2.2 times as fast"),
        (262144, "was not measured at 262,144 tokens; it was from 2,048 to 65,536 tokens, 125M on one H200"),
    ],
)
def test_the_faster_attention_is_named(length: int, words: str) -> None:
    assert words in compared_with_dense(load_config(None, [f"train.seq_len={length}"]), "NVIDIA H200")


def test_no_speed_of_a_gpu_is_given_for_a_cpu() -> None:
    assert "was not measured on a CPU" in compared_with_dense(load_config(None, ["train.seq_len=8192"]), "CPU")


def test_the_price_and_a_limit_that_is_too_low_are_named(tmp_path: Path, monkeypatch, capsys) -> None:
    speed = SimpleNamespace(tokens_per_s=lambda config: 2048.0, percentile_ms=lambda percent: 1000.0, peak_gib=None)
    monkeypatch.setattr(estimate, "measure_steps", lambda *_: speed)
    overrides = [
        f"train.out_dir={tmp_path}",
        "train.steps=7200",
        "runtime.device=cpu",
        "cost.per_hour=2.5",
        "cost.max=4",
    ]
    assert run_estimate(load_config(None, overrides)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "price       5.00 $ at 2.50 $ an hour" in lines
    assert "warning     cost.max=4 ends the run before its last step" in lines


def test_the_disk_of_small_checkpoints_is_not_rounded_to_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    speed = SimpleNamespace(tokens_per_s=lambda config: 2048.0, percentile_ms=lambda percent: 1000.0, peak_gib=None)
    monkeypatch.setattr(estimate, "measure_steps", lambda *_: speed)
    showcase = MEASURED.parents[2] / "configs" / "train_showcase.yaml"
    assert run_estimate(load_config(showcase, [f"train.out_dir={tmp_path}", "runtime.device=cpu"])) == 0
    assert "0.01 GiB per checkpoint, 0.04 GiB at most" in capsys.readouterr().out
