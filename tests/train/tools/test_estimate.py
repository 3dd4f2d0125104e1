"""The comparison of NSA with dense attention in the estimate is the one that was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tamis.config import load_config
from tamis.train.tools.estimate import NSA_OVER_DENSE, compared_with_dense

MEASURED = Path(__file__).parents[3] / "docs" / "data" / "train.json"


def test_the_table_holds_the_published_measurements() -> None:
    rows = {(row["length"], row["attention"]): row["toks_per_s"] for row in json.loads(MEASURED.read_text())["rows"]}
    lengths = sorted({length for length, _ in rows})
    ratios = {length: rows[length, "nsa"] / rows[length, "dense"] for length in lengths}
    assert pytest.approx(ratios, abs=0.006) == NSA_OVER_DENSE


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (2048, "dense is faster, NSA about 0.78 times as fast; model.attention=dense"),
        (8192, "about equally fast"),
        (32768, "at 32,768 tokens NSA is faster, about 2.1 times as fast"),
        (262144, "(not measured) NSA is faster"),
    ],
)
def test_the_faster_attention_is_named(length: int, words: str) -> None:
    assert words in compared_with_dense(load_config(None, [f"train.seq_len={length}"]))
