"""The hub path is the real `datasets` code: on a folder laid out as FineWeb-Edu, and over HTTP from a stand-in hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tamis.config import Config
from tamis.data import DataError, open_loader, order, validation_batches
from tamis.data.hub import BlockCache, open_hub
from tamis.data.sample import SAMPLE_FOLDER
from tests.data.conftest import config_of
from tests.data.fake_hub import COMMIT, FakeHub

NAME = "HuggingFaceFW/fineweb-edu"
ROOT = Path(__file__).parents[2]
CARD = """---
configs:
- config_name: default
  features:
  - {name: text, dtype: string}
  - {name: id, dtype: string}
  - {name: dump, dtype: string}
  - {name: url, dtype: string}
  - {name: file_path, dtype: string}
  - {name: language, dtype: string}
  - {name: language_score, dtype: float64}
  - {name: token_count, dtype: int64}
  - {name: score, dtype: float64}
  - {name: int_score, dtype: int64}
  data_files:
  - {split: train, path: data/*/*}
- config_name: sample-10BT
  data_files:
  - {split: train, path: sample/10BT/*}
---
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """FineWeb-Edu's layout, card and columns, with the embedded sample's documents."""
    folder = tmp_path_factory.mktemp("hub") / "fineweb-edu"
    for part in ("sample/10BT", "data/CC-MAIN-2024-10"):
        (folder / part).mkdir(parents=True)
    for file in SAMPLE_FOLDER.glob("*.parquet"):
        shutil.copy(file, folder / "sample" / "10BT" / file.name)
    shutil.copy(file, folder / "data" / "CC-MAIN-2024-10" / "000_00000.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


def hub_config(name: Path | str, **overrides: object) -> Config:
    settings = {"data_lanes": 8, "train_seq_len": 512, "train_batch_size": 16, "data_epochs": None, **overrides}
    return config_of(data_dataset="fineweb_edu", data_hub_name=str(name), data_tokenizer="gpt2", **settings)


def local_config(config: Config, folder: Path) -> Config:
    changes = {"dataset": "fineweb_edu_local", "local_path": str(folder / "sample" / "10BT")}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def first_batches(config: Config, count: int) -> np.ndarray:
    loader = open_loader(config)
    try:
        return np.stack([loader.next().tokens for _ in range(count)])
    finally:
        loader.close()


def test_a_hub_subset_gives_the_same_batches_as_its_files_do_locally(repository):
    config = hub_config(repository)
    assert "4 files" in open_loader(config).description
    assert np.array_equal(first_batches(config, 20), first_batches(local_config(config, repository), 20))


def test_another_subset_gives_other_documents(repository):
    assert "1 file," in open_loader(hub_config(repository, data_hub_subset="default")).description


def test_a_plain_folder_of_parquet_files_needs_no_card(repository):
    config = hub_config(repository / "sample" / "10BT")
    assert np.array_equal(first_batches(config, 3), first_batches(local_config(config, repository), 3))


def test_resuming_in_the_middle_of_a_file_is_exact(repository, monkeypatch):
    monkeypatch.setattr(order, "WINDOW_DOCUMENTS", 10)
    config = hub_config(repository, train_seq_len=2048)
    loader = open_loader(config)
    batches = [loader.next().tokens for _ in range(20)]
    state = loader.state()
    assert state["deal"]["start"][2] > 0  # in the middle of a file
    loader.close()
    resumed = open_loader(config)
    resumed.restore(json.loads(json.dumps(state)))
    rest = np.stack([resumed.next().tokens for _ in range(5)])
    resumed.close()
    assert np.array_equal(rest, first_batches(config, 25)[20:])
    assert len(batches) == 20


def test_held_out_documents_come_from_the_hub_too(repository):
    config = hub_config(repository, train_eval_batches=2, train_batch_size=4)
    held_out = np.concatenate(validation_batches(config))
    assert held_out.shape == (8, 513)
    assert np.array_equal(held_out, np.concatenate(validation_batches(local_config(config, repository))))


def test_a_wrong_subset_or_column_is_an_error_that_names_the_existing_ones(repository):
    with pytest.raises(DataError, match=r"no column 'body'.*data\.text_column"):
        open_loader(hub_config(repository, data_text_column="body"))


def test_a_damaged_file_is_an_error_that_names_it(repository, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(repository / "sample" / "10BT", folder)
    for file in sorted(folder.glob("*.parquet"))[1:]:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"train-0000\d-of-00004\.parquet:1 cannot be read"):
        first_batches(hub_config(folder), 200)


def test_an_interrupted_read_continues_with_the_next_record(repository, monkeypatch):
    source = open_hub(hub_config(repository).data)
    expected, records, calls = list(source.read(0)), source._records, []

    def flaky(file: int, start: int):
        calls.append(start)
        for count, record in enumerate(records(file, start)):
            if count == 7 and len(calls) < 6:
                raise ConnectionError("cut off")
            yield record

    monkeypatch.setattr(source, "_pauses_s", (0.0, 0.0))
    monkeypatch.setattr(source, "_records", flaky)
    assert list(source.read(0)) == expected
    assert calls == [0, 7, 14, 21, 28, 35]


def test_a_lasting_network_failure_is_an_error_after_the_retries(repository, monkeypatch):
    source, pauses = open_hub(hub_config(repository).data), []

    def dead(file: int, start: int):
        raise ConnectionError("no route to host")
        yield

    monkeypatch.setattr(source, "_pauses_s", (1.0, 2.0, 4.0))
    monkeypatch.setattr(source, "_records", dead)
    monkeypatch.setattr("tamis.data.hub.time.sleep", pauses.append)
    with pytest.raises(DataError, match=r"no route to host.*check the network.*HF_DATASETS_CACHE"):
        list(source.read(0))
    assert pauses == [1.0, 2.0, 4.0]


READER = """
import hashlib, json, sys, time
import datasets
from tamis.config import load_config
from tamis.data import DataError, hub, open_loader
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.05))  # the libraries' pauses and ours, cut short
datasets.config.STREAMING_READ_MAX_RETRIES = 1  # so that our own attempts are needed
pause, pauses = hub.HubDataset._pause_or_give_up, []
hub.HubDataset._pause_or_give_up = lambda *arguments: (pauses.append(arguments), pause(*arguments))
config = load_config(sys.argv[1])
try:
    loader = open_loader(config)
    tokens = b"".join(loader.next().tokens.tobytes() for _ in range(20))
    print(json.dumps({"sha": hashlib.sha256(tokens).hexdigest(), "pauses": len(pauses)}))
except DataError as error:
    print(json.dumps({"error": str(error)}))
"""


def read_over_http(hub: FakeHub, config: Config, folder: Path, **variables: str) -> dict:
    """The first batches as a process sees them whose hub is the stand-in."""
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    environment = {
        **os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", **variables,
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", READER, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def local_sha(config: Config, repository: Path) -> str:
    return hashlib.sha256(first_batches(local_config(config, repository), 20).tobytes()).hexdigest()


def test_over_http_only_the_subset_is_fetched_and_the_batches_are_the_same(repository, tmp_path):
    config = hub_config(NAME)
    with FakeHub(repository, NAME) as hub:
        seen = read_over_http(hub, config, tmp_path)
    assert seen == {"sha": local_sha(config, repository), "pauses": 0}
    assert any(f"resolve/{COMMIT}/sample/10BT" in request for request in hub.requests)
    assert not any("resolve" in request and "/data/" in request for request in hub.requests)


def test_processes_that_share_the_block_cache_keep_its_limit_together(tmp_path):
    caches = [BlockCache(tmp_path, 1000) for _ in range(4)]
    for number, cache in enumerate(caches):
        cache.write(f"block{number}", bytes(400))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["block0.block", "block1.block"]


def test_a_restart_reads_cached_blocks_from_disk_and_the_cache_stays_below_its_limit(repository, tmp_path):
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    config = hub_config(NAME, data_hub_subset="default")  # its card has the columns: opening reads no content
    with FakeHub(repository, NAME) as hub:
        first = read_over_http(hub, config, tmp_path, **cache)
        before = hub.reads
        hub.stall.set()  # the second process reads no content from the hub
        second = read_over_http(hub, config, tmp_path, **cache)
        hub.stall.clear()
        assert before > 0 and hub.reads == before
        small = hub_config(NAME, data_hub_subset="default", data_cache_gib=1e-6)
        third = read_over_http(hub, small, tmp_path, HF_DATASETS_CACHE=str(tmp_path / "small"))
    assert first == second == third and first["pauses"] == 0  # the third stores no block
    assert list((tmp_path / "cache").rglob("*.block")) and not list((tmp_path / "cache").rglob("*.tmp"))
    assert sum(file.stat().st_size for file in (tmp_path / "small").rglob("*.block")) <= 1e-6 * 2**30


def test_dropped_reads_lose_no_document(repository, tmp_path):
    config = hub_config(NAME)
    with FakeHub(repository, NAME) as hub:
        hub.dropped_reads = range(4, 20)
        seen = read_over_http(hub, config, tmp_path)
    assert seen.get("sha") == local_sha(config, repository), seen
    assert seen["pauses"] > 0


def test_a_hub_that_stalls_is_an_error_after_the_timeout(repository, tmp_path):
    with FakeHub(repository, NAME) as hub:
        hub.stall.set()
        seen = read_over_http(hub, hub_config(NAME, data_loader_timeout_s=3.0), tmp_path)
        hub.stall.clear()
    assert "within 3 s" in seen["error"]
    assert "data.loader_timeout_s" in seen["error"]


def test_the_sample_is_in_row_groups_so_that_resuming_can_be_cheap():
    assert pq.ParquetFile(next(SAMPLE_FOLDER.glob("*.parquet"))).num_row_groups > 1


def test_reading_loads_no_torch_and_starts_no_threads_that_could_abort_the_process_at_its_end(repository):
    program = (
        "import os, sys; from tamis.config import load_config; from tamis.data.hub import open_hub\n"
        "source = open_hub(load_config(sys.argv[1]).data); threads = lambda: set(os.listdir('/proc/self/task'))\n"
        "before = threads(); records = source.read(0); next(records)\n"
        "print(len(threads() - before), 'torch' in sys.modules)"  # a thread that imports started may end meanwhile
    )
    config = repository.parent / "threads.yaml"
    config.write_text(hub_config(repository).to_yaml())
    done = subprocess.run([sys.executable, "-c", program, config], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]
