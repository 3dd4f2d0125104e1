"""Sharding and resuming, of streams and shards: one global order for every world size, nothing lost or repeated."""

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.config import Config, load_config
from tamis.data import DataError, Loader, merge_states, open_loader, order
from tamis.data.local_files import LocalFiles
from tamis.data.order import shuffled
from tamis.data.prepare import prepare
from tamis.data.stream import document_order
from tests.data.conftest import config_of, documents, write_corpus

GLOBAL_BATCH = 8
KINDS = ("fineweb_edu_local", "shards", "synthetic")


@pytest.fixture(autouse=True, scope="module")
def small_windows():
    """Windows of a few documents, so that small corpora have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "WINDOW_DOCUMENTS", 7)
        yield


def config_for(kind: str, folder: Path, world_size: int, **overrides) -> Config:
    """The same global batch for every world size."""
    local = config_of(data_dataset="fineweb_edu_local", data_local_path=str(folder), data_epochs=None, **overrides)
    shards = folder.parent / "shards"
    if kind == "shards":
        prepare(local, shards, workers=1, shard_tokens=300)
    path = str(shards if kind == "shards" else folder)
    batch = GLOBAL_BATCH // world_size
    return config_of(data_dataset=kind, data_local_path=path, data_epochs=None, train_batch_size=batch, **overrides)


def global_steps(config: Config, world_size: int, steps: int, state=None) -> tuple[np.ndarray, dict]:
    """Steps as one global sequence of samples [steps, GLOBAL_BATCH, …], and the position after them."""
    shares, states = [], []
    for rank in range(world_size):
        loader = open_loader(config, rank=rank, world_size=world_size)
        if state:
            loader.restore(json.loads(json.dumps(state)))
        shares.append(np.stack([loader.next().tokens.reshape(-1, config.train.seq_len + 1) for _ in range(steps)]))
        states.append(loader.state())
        loader.close()
    interleaved = np.stack(shares, axis=2).reshape(steps, GLOBAL_BATCH, -1)
    return interleaved, merge_states(states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_world_size_sees_the_same_global_order(corpus, kind, world_size):
    alone, state_alone = global_steps(config_for(kind, corpus, 1), 1, 30)
    together, state_together = global_steps(config_for(kind, corpus, world_size), world_size, 30)
    assert np.array_equal(alone, together)
    assert state_alone == state_together


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_splits_the_same_samples(corpus, kind):
    plain = config_for(kind, corpus, 1)
    split = config_for(kind, corpus, 4, train_accumulate_grad_batches=4)
    assert split.train.batch_size * 4 == plain.train.batch_size
    assert open_loader(split).next().tokens.shape == (4, 2, 17)
    assert np.array_equal(global_steps(plain, 1, 5)[0], global_steps(split, 1, 5)[0])


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    worlds=st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=4),
    legs=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
    count=st.integers(8, 80),
)
def test_resuming_with_other_world_sizes_changes_nothing(kind, worlds, legs, seed, count):
    with TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus, documents(count, seed), files=1 + seed % 3)
        steps = sum(legs[: len(worlds)])
        unbroken, _ = global_steps(config_for(kind, corpus, 1, train_seed=seed), 1, steps)
        pieces, state = [], None
        for world, leg in zip(worlds, legs, strict=False):
            config = config_for(kind, corpus, world, train_seed=seed)
            piece, state = global_steps(config, world, leg, state)
            pieces.append(piece)
        assert np.array_equal(unbroken, np.concatenate(pieces))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000), count=st.integers(5, 120), lanes=st.sampled_from([1, 2, 4]), seq_len=st.integers(1, 70)
)
def test_one_pass_of_a_stream_holds_every_training_document_once_and_whole(seed, count, lanes, seq_len):
    with TemporaryDirectory() as folder:
        texts = documents(count, seed)
        write_corpus(Path(folder), texts, files=1 + seed % 3)
        config = config_of(
            data_dataset="fineweb_edu_local", data_local_path=folder, data_lanes=lanes, train_seq_len=seq_len,
            train_batch_size=1, train_seed=seed,
        )  # fmt: skip
        lane_tokens = [[] for _ in range(lanes)]
        for number, row in enumerate(rows_until_the_end(config)):
            tokens = lane_tokens[number % lanes]
            assert not tokens or tokens[-1] == row[0]  # the next sample begins with the last target
            tokens.extend(row[1:] if tokens else row)
        finished, begun = documents_in(lane_tokens)
        training = training_texts(config)
        assert not Counter(finished) - Counter(training)  # none twice, none invented, none held out
        missing = Counter(training) - Counter(finished)
        # What is missing is the end of each lane: documents that were begun, and at most what one lane had more.
        assert sum(len(text) for text in missing.elements()) <= lanes * (max(map(len, texts)) + seq_len + 2)
        assert all(any(text.startswith(part) for text in missing) for part in begun)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(12, 60), seq_len=st.integers(1, 70))
def test_one_pass_of_shards_holds_every_token_as_a_target_once(seed, count, seq_len):
    with TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", documents(count, seed, longest=300), files=2)
        config = config_for("shards", Path(folder) / "corpus", 8, train_seed=seed, train_seq_len=seq_len)
        rows = rows_until_the_end(with_epochs(config, 1))
        files = sorted((Path(folder) / "shards").glob("train-*.bin"))
        assert len(files) > 1
        tokens = np.concatenate([np.fromfile(file, "<u2") for file in files])
        stretches = [tokens[i : i + seq_len + 1] for i in range(0, len(tokens) - seq_len, seq_len)]
        assert sorted(row.tolist() for row in rows) == sorted(stretch.tolist() for stretch in stretches)


def test_each_pass_over_a_stream_has_its_own_order_of_files_and_of_documents(corpus):
    def order_of(config: Config) -> list[list[str]]:
        passes: list[list[str]] = [[], [], []]
        for window in document_order(config, LocalFiles(config.data.local_path)).windows(order.Cursor(), epochs=3):
            passes[window.start.epoch] += [document.text for document in window.documents]
        return passes

    config = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus))
    one_file = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus / "part-0.jsonl"))
    other_seed = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus), train_seed=2)
    for of in (config, one_file):
        passes = order_of(of)
        assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
        assert len({tuple(texts) for texts in passes}) == 3
    assert order_of(config) == order_of(config)
    assert order_of(config)[0] != order_of(other_seed)[0]


def test_each_pass_over_shards_has_its_own_order_of_samples(corpus):
    config = config_for("shards", corpus, 8, train_seq_len=8)
    per_pass = len(rows_until_the_end(with_epochs(config, 1)))
    rows = [tuple(row.tolist()) for row in rows_until_the_end(with_epochs(config, 2))]
    first, second = rows[:per_pass], rows[per_pass:]
    assert sorted(first) == sorted(second)
    assert first != second
    other_seed = rows_until_the_end(with_epochs(config_for("shards", corpus, 8, train_seq_len=8, train_seed=2), 1))
    assert [tuple(row.tolist()) for row in other_seed] != first


def test_lanes_that_are_no_multiple_of_the_processes_are_refused(corpus):
    config = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus), data_lanes=4)
    with pytest.raises(DataError, match=r"data\.lanes is 4.*multiple of the 3 processes"):
        open_loader(config, rank=0, world_size=3)


def test_a_position_of_other_data_is_refused(corpus):
    config = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus))
    state = open_loader(config).state()
    (corpus / "part-0.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(DataError, match="other data"):
        open_loader(config).restore(state)


def test_positions_of_some_ranks_only_are_refused(corpus):
    config = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus), data_epochs=None)
    loader = open_loader(config, rank=1, world_size=2)
    loader.next()
    with pytest.raises(DataError, match="merge the positions of all ranks"):
        open_loader(config).restore(loader.state())


def test_positions_of_different_steps_do_not_merge(corpus):
    config = config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus), data_epochs=None)
    loaders = [open_loader(config, rank=rank, world_size=2) for rank in range(2)]
    loaders[0].next()
    with pytest.raises(DataError, match="positions differ"):
        merge_states([loader.state() for loader in loaders])


@given(count=st.integers(0, 3000), seed=st.integers(0, 10))
@settings(deadline=None)
def test_a_shuffle_is_a_permutation(count, seed):
    assert sorted(shuffled(count, seed).tolist()) == list(range(count))


def test_the_shuffle_never_changes():
    # A run resumed by a later version must find the same order: these numbers are part of the format.
    assert shuffled(10, 1337, 0).tolist() == [3, 1, 6, 2, 4, 8, 0, 9, 7, 5]


def with_epochs(config: Config, epochs: int) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"epochs": epochs})})


def rows_until_the_end(config: Config) -> list[np.ndarray]:
    loader, rows = open_loader(config), []
    try:
        while True:
            rows.append(loader.next().tokens.reshape(-1))
    except DataError as error:
        assert "ended after" in str(error) or "too few documents" in str(error)
    return rows


def documents_in(lanes: list[list[int]]) -> tuple[list[str], list[str]]:
    """The documents that each row of bytes holds whole, and the beginnings of those it breaks off in."""
    finished, begun = [], []
    for tokens in lanes:
        text = "".join("\0" if token == 256 else chr(token) for token in tokens)
        parts = text.split("\0")[1:]
        assert not text or text[0] == "\0"
        finished += parts[:-1]
        begun += parts[-1:]
    return finished, begun


def training_texts(config: Config) -> list[str]:
    every = document_order(config, LocalFiles(config.data.local_path))
    found = [document for file in range(len(every.source.names)) for _, document in every.documents(file)]
    return [document.text for document in found if not every.is_held_out(document)]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (1, 4)])
def test_a_stream_resumes_with_another_world_size_after_any_number_of_samples(before: int, after: int) -> None:
    """Also where the samples so far are no multiple of the new world size, so that ranks change lanes."""

    def config() -> Config:
        keys = ["data.dataset=sample", "data.tokenizer=byte", "data.lanes=12", "train.seq_len=64"]
        return load_config(None, [*keys, "train.batch_size=1", "data.val_fraction=0.05"])

    def rows(loaders: list[Loader], steps: int) -> list[bytes]:
        return [loader.next().tokens.tobytes() for _ in range(steps) for loader in loaders]

    whole = rows([open_loader(config())], 35)
    first = [open_loader(config(), rank=rank, world_size=before) for rank in range(before)]
    begun = rows(first, 5)
    position = merge_states([loader.state() for loader in first])
    second = [open_loader(config(), rank=rank, world_size=after) for rank in range(after)]
    for loader in second:
        loader.restore(position)
    went_on = rows(second, 5)
    assert begun + went_on == whole[: 5 * (before + after)]
