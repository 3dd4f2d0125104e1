"""An empty directory with one small config, where verbs may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tamis.config import load_config
from tests.checkout import MINIATURE, ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with one config, where verbs may write."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("NSA_") or name == "CONFIG"]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = load_config(ROOT / "configs" / "train_showcase.yaml", [*MINIATURE, "train.out_dir=out", "train.steps=3"])
    (tmp_path / "mine.yaml").write_text(config.to_yaml())
    return tmp_path
