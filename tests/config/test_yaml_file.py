"""What is written as YAML is read as the same values, also where a text looks like a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.config import build_config, load_config
from tamis.config.yaml_file import read_value, write_value
from tamis.run.files.info import read_info, write_info

TEXTS = ["19e976044560", "2e-4", "1E5", ".5e3", "-1e+2", "017", "1_000", "null", "yes", "2026-11-18", "12:30", "", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_looks_like_something_else_stays_a_text(text: str, tmp_path: Path) -> None:
    assert read_value(write_value({text: [text]})) == {text: [text]}
    write_info(tmp_path / "run.info", {"config_hash": text})
    assert read_info(tmp_path / "run.info") == {"config_hash": text}


@given(st.from_regex(r"[0-9a-f]{12}", fullmatch=True) | st.from_regex(r"[-+.0-9eE_:]{1,8}", fullmatch=True))
def test_hashes_and_texts_of_digits_come_back(text: str) -> None:
    assert read_value(write_value([text])) == [text]


@given(st.floats(allow_nan=False) | st.integers() | st.booleans() | st.none())
def test_other_values_come_back(value: object) -> None:
    assert read_value(write_value({"key": value})) == {"key": value}


def test_a_run_can_read_its_own_config_whatever_its_name_looks_like(tmp_path: Path) -> None:
    config = build_config({"model": {"name": "125e6"}, "train": {"out_dir": "2e3"}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml", []) == config
