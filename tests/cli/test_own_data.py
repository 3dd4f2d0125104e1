"""`tamis run --data`: one source, or several by weight, become keys of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tamis.cli.train import _data_overrides, _validation_override
from tamis.config import ConfigError, load_config
from tamis.data import DataError
from tamis.data.prepare import prepare


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts" / "a.txt").write_text("Some text.\n\n" * 50)
    return tmp_path


def test_files_and_shards_are_recognised_by_what_they_hold(texts: Path) -> None:
    one = load_config(None, _data_overrides(["my texts"]))
    assert (one.data.dataset, one.data.local_path, one.train.out_dir) == ("local", "my texts", "artifacts/my_texts")
    prepare(load_config(None, ["data.tokenizer=byte", *_data_overrides(["my texts"])]), "shards")
    shards = load_config(None, _data_overrides(["shards"]))
    assert (shards.data.dataset, shards.data.tokenizer) == ("shards", "byte")
    several = load_config(None, _data_overrides(["my texts=0.3", "shards=0.7", "sample"]))
    assert several.data.dataset == "mixture"
    assert several.data.mixture == {"my texts": 0.3, "shards": 0.7, "sample": 1.0}
    assert several.data.tokenizer == "byte"
    assert several.train.out_dir == "artifacts/my_texts_shards_sample"


def test_wrong_paths_and_weights_are_refused_before_anything_starts(texts: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        _data_overrides(["none"])
    with pytest.raises(ConfigError, match="the weight 'much' is not a number"):
        _data_overrides(["my texts=much"])
    (texts / "a=b.txt").write_text("text")
    assert "data.dataset=local" in _data_overrides(["a=b.txt"])


def test_a_text_too_small_to_hold_some_out_is_trained_without_validation(texts: Path) -> None:
    words = _data_overrides(["my texts"])
    assert _validation_override("configs/train_showcase.yaml", words) == ["data.val_fraction=0"]
    for n in range(40):
        (texts / "my texts" / f"{n}.txt").write_text(f"Text number {n}. " * 400)
    assert _validation_override("configs/train_showcase.yaml", words) == []
