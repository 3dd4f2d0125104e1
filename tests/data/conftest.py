"""Small corpora and configurations for the data tests."""

import json
import random
from pathlib import Path

import pytest

from tamis.config import Config, load_config


def config_of(**overrides: object) -> Config:
    """A byte-level configuration with short samples; overrides as keywords, `data_lanes=4` for data.lanes."""
    defaults = {
        "data_tokenizer": "byte",
        "data_val_fraction": 0.1,
        "data_lanes": 4,
        "train_seq_len": 16,
        "train_batch_size": 2,
    }
    values = {**defaults, **overrides}
    return load_config(None, [f"{key.replace('_', '.', 1)}={json.dumps(value)}" for key, value in values.items()])


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for the checksums that a machine remembers."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three JSONL files of 60 documents, all different, of 5 to 200 bytes."""
    folder = tmp_path / "corpus"
    write_corpus(folder, documents(60), files=3)
    return folder


def documents(count: int, seed: int = 0, longest: int = 200) -> list[str]:
    rng = random.Random(seed)
    return [f"{i}:" + "".join(rng.choices("abc ", k=rng.randint(5, longest))) for i in range(count)]


def write_corpus(folder: Path, texts: list[str], files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        lines = [json.dumps({"text": text, "id": str(i)}) for i, text in enumerate(texts[file::files])]
        (folder / f"part-{file}.jsonl").write_text("\n".join(lines) + "\n")
