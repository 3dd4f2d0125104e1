"""Several sources mixed by weight: the right shares, the same order for any number of processes, resumable anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tamis.config import Config, ConfigError, load_config
from tamis.data import DataError, merge_states, open_loader, validation_batches
from tamis.data.mixture import Turns
from tamis.data.opening import open_samples
from tamis.data.prepare import prepare
from tests.data.conftest import config_of, documents, write_corpus

LANES = 12


@pytest.fixture
def mixture(tmp_path: Path) -> Config:
    """Text with letters a to c, the same letters in capitals, and shards of digits, with weights 2, 1 and 1."""
    small = documents(300)
    write_corpus(tmp_path / "small", small, files=2)
    write_corpus(tmp_path / "large", [text.upper() for text in small], files=1)
    write_corpus(tmp_path / "digits", [text.translate(str.maketrans("abc", "123")) for text in small], files=1)
    digits = config_of(data_dataset="local", data_local_path=str(tmp_path / "digits"))
    prepare(digits, tmp_path / "shards", workers=1)
    weights = {str(tmp_path / "small"): 2.0, str(tmp_path / "large"): 1.0, str(tmp_path / "shards"): 1.0}
    return mixed(weights)


def mixed(weights: dict[str, float], **overrides: object) -> Config:
    keys = {"data_epochs": None, "data_lanes": LANES, "train_batch_size": 3}
    return config_of(data_dataset="mixture", data_mixture=weights, **{**keys, **overrides})


def kind_of(row: np.ndarray) -> str:
    letters = Counter(chr(token) for token in row.tolist() if token < 256)
    counts = {"small": sum(letters[x] for x in "abc"), "large": sum(letters[x] for x in "ABC")}
    counts["digits"] = sum(letters[x] for x in "123")
    return max(counts, key=lambda kind: counts[kind])


def global_rows(config: Config, worlds: list[int], batches: int) -> np.ndarray:
    """The samples of `batches` global batches for each world size in turn, each resumed from the one before."""
    rows, state = [], None
    for world in worlds:
        ranks = [open_samples(config, rank, world) for rank in range(world)]
        for samples in ranks if state else []:
            samples.restore(state)
        for _ in range(batches):
            rows += [row for step in zip(*(samples.take(3) for samples in ranks), strict=True) for row in step]
        state = merge_states([samples.state() for samples in ranks])
    return np.stack(rows)


def test_the_sources_appear_by_their_weights_and_text_is_not_mixed_within_a_sample(mixture: Config) -> None:
    rows = global_rows(mixture, [1], batches=4 * LANES)
    kinds = [kind_of(row) for row in rows]
    assert Counter(kinds) == {"small": 6 * LANES, "large": 3 * LANES, "digits": 3 * LANES}
    assert len(set(kinds[:LANES])) == 1


def test_the_order_is_the_same_for_any_processes_and_after_resuming_with_others(mixture: Config) -> None:
    alone = global_rows(mixture, [1], batches=40)
    for worlds in ([1] * 5, [2, 2], [1, 2, 1, 3], [1, 4, 3, 2]):
        rows = global_rows(mixture, worlds, batches=3)
        assert np.array_equal(rows, alone[: len(rows)]), worlds


def test_a_loader_resumes_exactly_and_refuses_other_weights(mixture: Config) -> None:
    first = open_loader(mixture)
    for _ in range(7):
        first.next()
    again = open_loader(mixture)
    again.restore(first.state())
    assert np.array_equal(again.next().tokens, first.next().tokens)
    other = open_loader(mixed({**(mixture.data.mixture or {}), "sample": 1.0}))
    with pytest.raises(DataError, match="belongs to other data"):
        other.restore(first.state())


def test_validation_holds_text_of_every_source(mixture: Config) -> None:
    rows = np.concatenate(validation_batches(mixture))
    assert {kind_of(row) for row in rows} == {"small", "large", "digits"}


def test_a_source_that_ends_is_named(mixture: Config) -> None:
    loader = open_loader(mixed(mixture.data.mixture or {}, data_epochs=1))
    with pytest.raises(DataError, match=r"of data\.mixture: the data ended .* or lower its weight"):
        for _ in range(10_000):
            loader.next()


def test_turns_keep_every_source_within_one_block_of_its_weight() -> None:
    turns = Turns([0.7, 0.2, 0.1])
    counts = np.array([turns.before(block) for block in range(1000)])
    lag = np.arange(1000)[:, None] * turns.shares - counts
    assert np.abs(lag).max() < 1.0


def test_a_mixture_needs_its_sources_and_weights() -> None:
    for overrides in (["data.dataset=mixture"], ["data.mixture={sample: 1.0}"]):
        with pytest.raises(ConfigError, match=r"data\.mixture must name sources and weights"):
            load_config(None, overrides)
    with pytest.raises(ConfigError, match=r"data\.mixture"):
        load_config(None, ["data.dataset=mixture", "data.mixture={sample: 0}"])
