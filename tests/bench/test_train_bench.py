"""The training bench: both kinds of attention at each length, without and with data, on one model per kind."""

from pathlib import Path

import pytest

from tamis.bench import train as bench
from tamis.train.tools.probe import Probe
from tests.train.processes import tiny_config


def test_a_row_for_each_length_attention_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Counted(Probe):
        def __init__(self, config, device):  # type: ignore[no-untyped-def]
            built.append((config.train.seq_len, config.model.attention))
            super().__init__(config, device)

    monkeypatch.setattr(bench, "Probe", Counted)
    document = bench.measure_training(tiny_config(tmp_path), [32, 64], tokens=128, steps=2, warmup=1, with_data=True)
    kinds = [(length, attention) for length in (32, 64) for attention in ("dense", "nsa")]
    rows = document["rows"]
    assert [(row["length"], row["attention"], row["data"]) for row in rows] == [
        (*kind, source) for kind in kinds for source in ("none", "shards")
    ]
    assert all(row["tokens_per_step"] == 128 for row in rows)
    assert built == kinds  # built and compiled once: the sources alone differ between two rows
    assert all(row["toks_per_s"] > 0 and row["step_p95_ms"] >= row["step_p50_ms"] > 0 for row in rows)


def test_a_row_names_the_tokens_of_whole_sequences_that_a_step_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bench.measure_training(tiny_config(tmp_path), [32, 64], tokens=100, steps=1, warmup=0, with_data=False)
    assert [row["tokens_per_step"] for row in document["rows"]] == [96, 96, 64, 64]
    printed = capsys.readouterr().out
    assert "96 tokens at length 32, in place of 100: whole sequences alone" in printed
    assert "64 tokens at length 64, in place of 100" in printed
