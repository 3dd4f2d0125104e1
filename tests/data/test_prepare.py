"""Preparing shards: the same bytes for any number of threads and after any kill; damaged shards are refused."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tamis.config import Config
from tamis.data import DataError, checksums, open_loader, tokenizer_for, validation_batches
from tamis.data.opening import open_samples
from tamis.data.prepare import PrepareProgress, prepare
from tamis.data.shards import damaged_shards, read_shard_manifest, tokenizer_of_shards
from tamis.data.tokenizer import GPT2_RANKS
from tests.data.conftest import config_of, documents, write_corpus

SHARD_TOKENS = 3000


def local(folder: Path, **overrides: object) -> Config:
    return config_of(data_dataset="fineweb_edu_local", data_local_path=str(folder), **overrides)


def shards(folder: Path, **overrides: object) -> Config:
    return config_of(data_dataset="shards", data_local_path=str(folder), **overrides)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def test_every_document_is_in_the_shards_in_order_with_its_end_of_text(tmp_path):
    texts = documents(300)
    write_corpus(tmp_path / "corpus", texts, files=1)
    config = local(tmp_path / "corpus", data_tokenizer="gpt2", data_val_fraction=0.2)
    manifest = prepare(config, tmp_path / "out", workers=2, shard_tokens=SHARD_TOKENS)
    found = {}
    for split in ("train", "val"):
        files = sorted((tmp_path / "out").glob(f"{split}-*.bin"))
        ids = np.concatenate([np.fromfile(file, "<u2") for file in files])
        assert len(ids) == manifest.count("tokens", split)
        found[split] = tokenizer_for("gpt2").decode(ids.tolist()).split("<|endoftext|>")[1:]
        assert len(found[split]) == manifest.count("documents", split)
        assert found[split] == sorted(found[split], key=texts.index)
    assert len(list((tmp_path / "out").glob("train-*.bin"))) > 3
    assert sorted(found["train"] + found["val"]) == sorted(texts)
    assert 30 < len(found["val"]) < 90


def test_the_manifest_lists_every_shard(tmp_path, corpus):
    (corpus / "part-9.jsonl").write_text('{"text": ""}\nnot json\n')
    prepare(local(corpus, data_on_bad_record="skip"), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["origin"] == f"fineweb_edu_local {corpus}"
    assert manifest["tokenizer"] == "byte"
    assert manifest["dtype"] == "uint16"
    assert (manifest["bad_records"], manifest["empty_documents"]) == (1, 1)
    assert manifest["train_documents"] + manifest["val_documents"] == 60
    assert manifest["train_tokens"] == sum(s["tokens"] for s in manifest["shards"] if s["split"] == "train")
    assert all(len(shard["sha256"]) == 64 for shard in manifest["shards"])
    assert damaged_shards(tmp_path / "out") == []
    assert "1 records unreadable, 1 empty" in read_shard_manifest(tmp_path / "out").summary


def test_threads_and_repeats_do_not_change_a_byte(tmp_path, corpus):
    for name, workers in (("one", 1), ("five", 5)):
        prepare(local(corpus), tmp_path / name, workers=workers, shard_tokens=500)
    assert contents(tmp_path / "one") == contents(tmp_path / "five")
    before = (tmp_path / "one" / "manifest.json").stat().st_mtime_ns
    prepare(local(corpus), tmp_path / "one")  # finished: nothing to do
    assert (tmp_path / "one" / "manifest.json").stat().st_mtime_ns == before


KILLED = """
import sys, time
from tamis.config import load_config
from tamis.data import order, prepare
whole = order.DocumentOrder.documents
def slowly(self, file, start=0):
    for number, document in whole(self, file, start):
        time.sleep(0.002)
        yield number, document
order.DocumentOrder.documents = slowly
prepare.prepare(load_config(sys.argv[1]), sys.argv[2], workers=2, shard_tokens=3000)
"""


def test_prepare_after_a_kill_ends_with_the_same_bytes(tmp_path):
    write_corpus(tmp_path / "corpus", documents(2000), files=3)
    config = local(tmp_path / "corpus")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    prepare(config, tmp_path / "unbroken", shard_tokens=SHARD_TOKENS)
    out, kills = tmp_path / "killed", 0
    for wanted in (2, 6, 10):  # kill it each time some more shards are there
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "config.yaml"), str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while process.poll() is None and len(list(out.glob("train-*.bin"))) < wanted:
            time.sleep(0.01)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills == 3
    assert not read_shard_manifest(out).complete
    with pytest.raises(DataError, match="not finished"):
        open_loader(shards(out))
    prepare(config, out, shard_tokens=SHARD_TOKENS)
    assert contents(out) == contents(tmp_path / "unbroken")


def test_progress_is_reported_up_to_the_end(tmp_path, corpus):
    reports: list[PrepareProgress] = []
    manifest = prepare(local(corpus), tmp_path / "out", report=reports.append)
    last = reports[-1]
    assert (last.files_done, last.files, last.documents) == (3, 3, 60)
    assert last.tokens == manifest.count("tokens", "train") + manifest.count("tokens", "val")
    assert "3/3 files, 60 documents" in str(last)


def test_other_data_does_not_overwrite_prepared_shards(tmp_path, corpus):
    prepare(local(corpus), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="another source, split or tokenizer"):
        prepare(local(corpus, data_tokenizer="gpt2"), tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_source_without_documents_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no training document"):
        prepare(local(tmp_path / "empty.jsonl"), tmp_path / "out")


def test_a_second_prepare_in_one_folder_is_refused(tmp_path, corpus):
    from tamis.data.prepare import _locked

    (tmp_path / "out").mkdir()
    with _locked(tmp_path / "out"), pytest.raises(DataError, match="another process is preparing"):
        prepare(local(corpus), tmp_path / "out")


def test_a_full_disk_keeps_finished_shards_and_is_reported(tmp_path, corpus, monkeypatch):
    from tamis.data import prepare as module

    publish, calls = module._publish, []

    def full(temporary: Path, final: Path) -> None:
        calls.append(final)
        if len(calls) == 7:
            raise OSError(28, "No space left on device")
        publish(temporary, final)

    monkeypatch.setattr(module, "_publish", full)
    with pytest.raises(DataError, match=r"No space left.*same command continues"):
        prepare(local(corpus), tmp_path / "out", shard_tokens=500)
    assert len(read_shard_manifest(tmp_path / "out").shards) >= 2
    prepare(local(corpus), tmp_path / "out", shard_tokens=500)
    prepare(local(corpus), tmp_path / "fresh", shard_tokens=500)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_damaged_or_shortened_shard_is_found(tmp_path, corpus):
    prepare(local(corpus), tmp_path)
    path = tmp_path / "train-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\0\0")
    assert damaged_shards(tmp_path) == ["train-00000.bin"]
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train-00000\.bin holds"):
        open_loader(shards(tmp_path))


@pytest.mark.parametrize(
    "manifest", ["{", "{}", "[]", 100_000 * "[", '{"format": 99}', '{"format": 1, "shards": [{"file": 1}]}']
)
def test_a_manifest_that_cannot_be_understood_is_an_error_that_names_it(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_loader(shards(tmp_path))


def test_shards_keep_a_tokenizer_of_ones_own_and_its_wide_ids(tmp_path, corpus):
    ranks = [*GPT2_RANKS.read_bytes().splitlines()[:256], base64.b64encode(b"ab") + b" 70000"]
    (own := tmp_path / "own.tiktoken").write_bytes(b"\n".join(ranks))
    folder = tmp_path / "out"
    made = prepare(local(corpus, data_tokenizer=str(own)), folder)
    own.unlink()
    assert made.dtype == "uint32"
    kept = tokenizer_of_shards(folder, made)
    with pytest.raises(DataError, match=f"set data.tokenizer to {kept}"):
        open_loader(shards(folder, data_tokenizer="gpt2"))
    tokens = open_loader(shards(folder, data_tokenizer=kept, train_batch_size=20)).next().tokens
    assert tokens.max() == 70_001
    assert "ab" in tokenizer_for(kept).decode(tokens.ravel().tolist())


def test_shards_of_another_tokenizer_are_refused(tmp_path, corpus):
    prepare(local(corpus), tmp_path)
    with pytest.raises(DataError, match=r"set data\.tokenizer to byte"):
        open_loader(shards(tmp_path, data_tokenizer="gpt2"))


def test_a_folder_without_manifest_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(DataError, match="tamis data prepare"):
        open_loader(shards(tmp_path))


def test_shards_too_short_for_one_sample_are_refused(tmp_path, corpus):
    prepare(local(corpus), tmp_path)
    with pytest.raises(DataError, match=r"too few for train\.seq_len"):
        open_loader(shards(tmp_path, train_seq_len=100_000))


def test_validation_reads_the_held_out_shards_alone(tmp_path, corpus):
    prepare(local(corpus, data_val_fraction=0.3), tmp_path, shard_tokens=500)
    rows = np.concatenate(validation_batches(shards(tmp_path, train_eval_batches=3)))
    ids = np.concatenate([np.fromfile(file, "<u2") for file in sorted(tmp_path.glob("val-*.bin"))])
    assert np.array_equal(rows[:, :-1].ravel(), ids[: rows[:, :-1].size])


def change_token(path: Path, index: int, token: int) -> None:
    content = np.fromfile(path, "<u2")
    content[index] = token
    content.tofile(path)


def test_training_finds_a_changed_shard_by_its_checksum_and_hashes_each_file_once(tmp_path, corpus, monkeypatch):
    hashed: list[str] = []
    original = checksums.file_sha256
    monkeypatch.setattr(checksums, "file_sha256", lambda path: hashed.append(path.name) or original(path))
    folder = tmp_path / "shards"
    prepare(local(corpus), folder, shard_tokens=500)
    for _ in range(2):
        samples = open_samples(shards(folder), 0, 1)
        samples.checksums.join()
        assert samples.take(1).shape == (1, 17)
    files = sorted(path.name for path in folder.glob("*.bin"))
    assert sorted(hashed) == files  # the second time they are remembered

    change_token(folder / files[0], 3, 65)
    samples = open_samples(shards(folder), 0, 1)
    samples.checksums.join()
    with pytest.raises(DataError, match=rf"{files[0]} is damaged \(its checksum differs\)"):
        samples.take(1)


def test_without_a_cache_folder_checksums_are_still_compared(tmp_path, corpus, monkeypatch):
    folder = tmp_path / "shards"
    prepare(local(corpus), folder)
    change_token(folder / "train-00000.bin", 3, 65)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    samples = open_samples(shards(folder), 0, 1)
    samples.checksums.join()
    assert samples.checksums.damaged == folder / "train-00000.bin"


def test_a_token_outside_the_vocabulary_is_an_error_that_names_the_file(tmp_path, corpus):
    prepare(local(corpus), tmp_path / "shards")
    change_token(tmp_path / "shards" / "train-00000.bin", 40, 300)
    loader = open_loader(shards(tmp_path / "shards", data_epochs=1))
    with pytest.raises(DataError, match=r"train-00000\.bin (holds the token 300 between|is damaged)"):
        while True:
            loader.next()


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "a/b.bin", "", ".."])
def test_a_manifest_names_only_files_inside_its_folder(tmp_path, corpus, name):
    prepare(local(corpus), tmp_path / "shards")
    path = tmp_path / "shards" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["file"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json cannot be read \(the shard .* is not a file name inside"):
        open_loader(shards(tmp_path / "shards"))
