"""The loader: positions exclude prefetched batches, ends and delays are errors, noise comes only on request."""

import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tamis.data import DataError, Loader, merge_states, open_loader, validation_batches
from tamis.data.stream import StreamSamples
from tests.data.conftest import config_of


def local(corpus: Path, **overrides: object):
    return config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus), **overrides)


def all_batches(loader: Loader) -> tuple[list[np.ndarray], str]:
    batches = []
    while True:
        try:
            batches.append(loader.next().tokens)
        except DataError as error:
            return batches, str(error)


def test_batches_have_the_documented_shape(corpus):
    batch = open_loader(local(corpus, train_accumulate_grad_batches=3)).next()
    assert batch.tokens.shape == (3, 2, 17)
    assert batch.tokens.dtype == np.int32
    assert batch.fetch_s > 0


def test_the_position_excludes_prefetched_batches(corpus):
    config = local(corpus, data_epochs=None, data_prefetch_batches=8)
    loader = open_loader(config)
    loader.next()
    time.sleep(0.2)  # let it run ahead
    resumed = open_loader(config)
    resumed.restore(json.loads(json.dumps(loader.state())))
    for _ in range(20):
        assert np.array_equal(loader.next().tokens, resumed.next().tokens)


def test_the_prefetch_depth_changes_no_batch(corpus):
    shallow, deep = (all_batches(open_loader(local(corpus, data_prefetch_batches=n))) for n in (1, 50))
    assert shallow[1] == deep[1]
    assert np.array_equal(np.stack(shallow[0]), np.stack(deep[0]))


@pytest.mark.parametrize("dataset", ["fineweb_edu_local", "sample"])
def test_the_end_of_the_data_is_an_error_and_stays_one(corpus, dataset):
    config = config_of(data_dataset=dataset, data_local_path=str(corpus), train_seq_len=400, train_batch_size=8)
    loader = open_loader(config)
    batches, message = all_batches(loader)
    if dataset == "sample":
        assert len(batches) > 1000
        assert "data ended after" in message
        assert "data.epochs" in message
    with pytest.raises(DataError):
        loader.next()
    assert not loader.is_synthetic


def test_two_epochs_are_about_twice_as_long(corpus):
    once, twice = (len(all_batches(open_loader(local(corpus, data_epochs=n)))[0]) for n in (1, 2))
    assert 1.7 * once < twice < 2.4 * once


def test_too_few_documents_for_the_lanes_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"too few documents for data\.lanes: 4"):
        open_loader(local(tmp_path)).next()


def test_data_without_any_document_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no training document"):
        open_loader(local(tmp_path, data_epochs=None)).next()


def test_a_source_that_stalls_is_an_error_after_the_timeout(corpus, stalled_source):
    loader = open_loader(local(corpus, data_loader_timeout_s=0.3))
    with pytest.raises(DataError, match=r"no batch within 0\.3 s.*data\.loader_timeout_s"):
        loader.next()
    with pytest.raises(DataError, match="no batch within"):  # and stays one
        loader.next()


def test_noise_replaces_a_stalled_source_only_on_request_and_marks_the_run(corpus, stalled_source):
    loader = open_loader(local(corpus, data_loader_timeout_s=0.3, data_synthetic_on_fail=True))
    assert not loader.is_synthetic
    loader.next()
    assert loader.is_synthetic
    assert "IN PLACE OF fineweb_edu_local" in loader.description
    assert "no batch within" in loader.description


def test_noise_replaces_missing_data_only_on_request(tmp_path):
    with pytest.raises(DataError):
        open_loader(local(tmp_path / "missing"))
    loader = open_loader(local(tmp_path / "missing", data_synthetic_on_fail=True))
    assert loader.is_synthetic
    assert "does not exist" in loader.description


def test_noise_on_one_rank_marks_the_merged_position(corpus):
    config = local(corpus, data_epochs=None, data_synthetic_on_fail=True)
    loaders = [open_loader(config, rank=rank, world_size=2) for rank in range(2)]
    loaders[0].substitute_noise("for this test")
    for loader in loaders:
        loader.next()
    state = merge_states([loader.state() for loader in reversed(loaders)])
    resumed = open_loader(config)
    resumed.restore(state)
    assert resumed.is_synthetic
    with pytest.raises(DataError, match=r"data\.synthetic_on_fail"):
        open_loader(local(corpus)).restore(state)


def test_an_unexpected_fault_in_the_background_reaches_the_caller(corpus, monkeypatch):
    def broken(self: StreamSamples, count: int) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(StreamSamples, "take", broken)
    with pytest.raises(ZeroDivisionError):
        open_loader(local(corpus)).next()


def test_closing_ends_the_background_thread(corpus):
    before = threading.active_count()
    loader = open_loader(local(corpus, data_epochs=None))
    loader.next()
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_waits_are_summarised_as_percentiles(corpus):
    loader = open_loader(local(corpus, data_epochs=None))
    assert loader.fetch_percentiles() == (0.0, 0.0)
    waits = sorted(loader.next().fetch_s for _ in range(21))
    p50, p95 = loader.fetch_percentiles()
    assert p50 == pytest.approx(waits[10])
    assert waits[19] <= p95 <= waits[20]


def test_synthetic_tokens_are_uniform_over_the_vocabulary():
    config = config_of(data_dataset="synthetic", train_seq_len=999, train_batch_size=50)
    tokens = open_loader(config).next().tokens
    counts = np.bincount(tokens.ravel(), minlength=257)
    assert len(counts) == 257
    chi_squared = ((counts - tokens.size / 257) ** 2 / (tokens.size / 257)).sum()
    assert 150 < chi_squared < 380  # 256 degrees of freedom: mean 256, standard deviation 23


def test_synthetic_validation_differs_from_synthetic_training():
    config = config_of(data_dataset="synthetic")
    loader = open_loader(config)
    trained = {row.tobytes() for _ in range(100) for row in loader.next().tokens[0]}
    assert not any(row.tobytes() in trained for batch in validation_batches(config) for row in batch)


def test_counting_cannot_beat_ln_v_on_synthetic_tokens():
    config = config_of(data_dataset="synthetic", train_seq_len=999, train_batch_size=100)
    counts = np.bincount(open_loader(config).next().tokens.ravel(), minlength=257) + 1
    unseen = np.concatenate([batch.ravel() for batch in validation_batches(config)])
    assert -np.log(counts / counts.sum())[unseen].mean() > math.log(257)


@pytest.fixture
def stalled_source(monkeypatch):
    """Reading blocks until the test is over, as a dead network drive does."""
    from tamis.data.local_files import LocalFiles

    released = threading.Event()
    read = LocalFiles.read
    seen = []

    def blocked(self: LocalFiles, file: int, start: int = 0):
        if threading.current_thread().name == "tamis-loader":
            released.wait(20)
        seen.append(file)
        return read(self, file, start)

    monkeypatch.setattr(LocalFiles, "read", blocked)
    yield
    released.set()
