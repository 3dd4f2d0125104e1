"""The held-out part: never in training, the same every time, shared equally by the ranks."""

import json

import numpy as np
import pytest

from tamis.data import DataError, open_loader, tokenizer_for, validation_batches
from tamis.data.prepare import prepare
from tamis.data.sample import entropies
from tests.data.conftest import config_of, documents, write_corpus


def local(folder, **overrides):
    return config_of(data_dataset="fineweb_edu_local", data_local_path=str(folder), **overrides)


def documents_in(rows) -> set[str]:
    text = tokenizer_for("byte").decode(np.concatenate([row[:-1] for row in rows]).tolist())
    return set(text.split("<|endoftext|>")[1:-1])


def test_no_held_out_document_is_trained_on_and_none_is_in_neither(tmp_path):
    texts = documents(200, longest=60)
    write_corpus(tmp_path, texts, files=2)
    config = local(tmp_path, data_lanes=1, data_val_fraction=0.2, train_eval_batches=200, train_batch_size=1)
    held_out = documents_in([row for batch in validation_batches(config) for row in batch])
    loader, rows = open_loader(config), []
    with pytest.raises(DataError, match="data ended"):
        while True:
            rows.append(loader.next().tokens.ravel())
    trained = documents_in(rows)
    assert not held_out & trained
    assert len(set(texts) - held_out - trained) <= 2  # the last document of either is cut off by the end
    assert 0.1 < len(held_out) / len(texts) < 0.3


def test_copies_of_a_document_land_in_the_same_split(tmp_path):
    texts = documents(100, longest=40)
    write_corpus(tmp_path, texts + texts, files=2)
    config = local(tmp_path, data_lanes=1, data_val_fraction=0.2, train_eval_batches=500, train_batch_size=1)
    rows = [row for batch in validation_batches(config) for row in batch]
    text = tokenizer_for("byte").decode(np.concatenate([row[:-1] for row in rows]).tolist())
    found = text.split("<|endoftext|>")[1:-1]
    assert len(found) >= 2 * len(set(found)) - 2


def test_a_tiny_corpus_still_holds_something_out(tmp_path):
    write_corpus(tmp_path, documents(6), files=1)
    config = local(tmp_path, data_val_fraction=0.0001, train_batch_size=1)
    assert len(validation_batches(config)) >= 1


@pytest.mark.parametrize("dataset", ["sample", "synthetic", "shards"])
def test_validation_is_the_same_every_time_and_for_every_world_size(tmp_path, dataset):
    if dataset == "shards":
        prepare(config_of(data_dataset="sample"), tmp_path, workers=1)
    size = {"data_dataset": dataset, "data_local_path": str(tmp_path), "train_seq_len": 64, "train_eval_batches": 3}
    alone = validation_batches(config_of(**size, train_batch_size=4))
    assert [batch.shape for batch in alone] == [(4, 65)] * 3
    assert all(batch.dtype == np.int32 for batch in alone)
    shares = [validation_batches(config_of(**size, train_batch_size=2), rank=rank, world_size=2) for rank in range(2)]
    assert [len(share) for share in shares] == [3, 3]
    together = np.stack([np.concatenate(share) for share in shares], axis=1).reshape(-1, 65)
    assert np.array_equal(together, np.concatenate(alone))


def test_with_little_held_out_text_every_rank_gets_equally_many_samples(tmp_path):
    write_corpus(tmp_path, documents(60), files=1)
    config = local(tmp_path, data_val_fraction=0.1, train_eval_batches=1000, train_batch_size=4)
    counts = [[len(b) for b in validation_batches(config, rank=r, world_size=4)] for r in range(4)]
    assert counts[0]
    assert counts == [counts[0]] * 4
    assert set(counts[0]) == {4}


def test_too_little_held_out_is_an_error_that_names_the_keys(tmp_path):
    write_corpus(tmp_path, documents(6, longest=20), files=1)
    with pytest.raises(DataError, match=r"data\.val_fraction.*train\.seq_len"):
        validation_batches(local(tmp_path, train_seq_len=500))


def test_failed_data_that_noise_replaces_has_no_validation(tmp_path):
    assert validation_batches(local(tmp_path / "missing", data_synthetic_on_fail=True)) == []
    with pytest.raises(DataError, match="does not exist"):
        validation_batches(local(tmp_path / "missing"))


def test_without_a_held_out_part_there_is_no_validation(corpus):
    assert validation_batches(local(corpus, data_val_fraction=0.0)) == []


def test_counting_bytes_gives_the_entropies_a_model_must_beat():
    config = config_of(data_dataset="sample", data_val_fraction=0.05, train_seq_len=256, train_eval_batches=50)
    validation = validation_batches(config)
    unigram, bigram = entropies(config, validation)
    inputs = np.concatenate([batch[:, :-1].ravel() for batch in validation])
    targets = np.concatenate([batch[:, 1:].ravel() for batch in validation])
    assert empirical(targets) - 0.02 < unigram < empirical(targets) + 0.1
    conditional = empirical(inputs * 257 + targets) - empirical(inputs)
    assert conditional < bigram < unigram
    assert json.dumps([unigram, bigram])  # plain numbers


def empirical(values) -> float:
    """Entropy in nats of the values' own frequencies: the least any counting can reach on them."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts / counts.sum() * np.log(counts / counts.sum())).sum())
