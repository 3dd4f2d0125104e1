"""The data checks an operator runs: true exit codes, text to look at, the cause and the remedy when it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tamis.data.check import run_data_check
from tamis.data.checksums import file_sha256
from tamis.data.prepare import prepare
from tamis.data.sample import SAMPLE_FOLDER
from tests.data.conftest import config_of

ROOT = Path(__file__).parents[2]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def checked(config, batches: int = 3, **options) -> tuple[int, str]:
    lines: list[str] = []
    return run_data_check(config, batches, say=lines.append, **options), "\n".join(lines)


def test_good_data_passes_and_shows_its_text():
    code, said = checked(config_of(data_dataset="sample", train_seq_len=64))
    assert code == 0
    assert "ok batch[2] lens: [65, 65]" in said
    assert "'<|endoftext|>" in said
    assert "ok ranks: 2 ranks have disjoint shares, together the global batch of 4 rows" in said
    assert "ok validation: 20 batches" in said
    assert "per second of processor time" in said


def test_shards_are_checked_against_their_checksums(tmp_path, corpus):
    prepare(config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus)), tmp_path / "out")
    config = config_of(data_dataset="shards", data_local_path=str(tmp_path / "out"))
    code, said = checked(config)
    assert (code, "ok shards" in said) == (0, True)
    file = tmp_path / "out" / "train-00000.bin"
    file.write_bytes(file.read_bytes()[:-2] + b"\1\1")
    code, said = checked(config)
    assert code == 6
    assert "FAILED: damaged shards" in said
    assert "train-00000.bin" in said


def test_substituted_noise_fails_the_check(tmp_path):
    config = config_of(
        data_dataset="fineweb_edu_local", data_local_path=str(tmp_path / "missing"), data_synthetic_on_fail=True
    )
    code, said = checked(config)
    assert code == 6
    assert "noise replaced the data" in said


def test_ids_outside_the_vocabulary_fail_the_check(tmp_path, corpus):
    prepare(config_of(data_dataset="fineweb_edu_local", data_local_path=str(corpus)), tmp_path / "out")
    file = tmp_path / "out" / "train-00000.bin"
    manifest, before = tmp_path / "out" / "manifest.json", file_sha256(file)
    file.write_bytes(b"\xff\xff" * (file.stat().st_size // 2))
    manifest.write_text(manifest.read_text().replace(before, file_sha256(file)))
    code, said = checked(config_of(data_dataset="shards", data_local_path=str(tmp_path / "out")))
    assert code == 6
    assert "outside the vocabulary" in said


def test_the_stream_check_passes_on_a_dataset_it_can_reach(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{hub_name: {SAMPLE_FOLDER}, val_fraction: 0.05}}\ntrain: {{seq_len: 512}}\n")
    result = run("scripts/datasets/check_fwe_stream.py", CONFIG=str(config))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok batch[0] lens: [513, 513, 513, 513]" in result.stdout


def test_the_stream_check_fails_within_seconds_and_names_the_remedies_if_the_hub_is_unreachable():
    unreachable = "http://hub.invalid"  # .invalid never resolves, by RFC 2606
    result = run("scripts/datasets/check_fwe_stream.py", HF_ENDPOINT=unreachable, CONFIG="configs/m7c_125m_40g.yaml")
    assert result.returncode == 6, result.stdout + result.stderr
    assert "hub.invalid cannot be reached" in result.stdout
    assert "network" in result.stdout
    assert "HF_DATASETS_CACHE" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("override", "code"), [("data.epochs=1", 0), ("train.seq_len=1000000", 6)])
def test_the_loader_script_reports_what_it_measured(tmp_path, override, code):
    config = tmp_path / "config.yaml"
    config.write_text("data: {dataset: sample, val_fraction: 0.05}\ntrain: {seq_len: 128, batch_size: 3}\n")
    result = run("scripts/datasets/fineweb_edu_loader.py", "--config", str(config), "--batches", "7", override)
    assert result.returncode == code, result.stdout + result.stderr
    assert ("ok batch[6] lens: [129, 129, 129]" in result.stdout) == (code == 0)
    assert ("data.lanes" in result.stdout) == (code == 6)


def test_the_loader_script_refuses_an_unknown_key():
    result = run("scripts/datasets/fineweb_edu_loader.py", "--config", "missing.yaml")
    assert result.returncode == 2
    assert "missing.yaml does not exist" in result.stderr
