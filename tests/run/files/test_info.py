"""run.info holds every field an operator needs, and no ETA before anything was measured."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tamis.config import load_config
from tamis.config.size import parameter_count
from tamis.run.files.hardware import Gpu, GpuSpeed
from tamis.run.files.info import ETA_UNKNOWN, altered_files, describe_run, git_commit, read_info, write_eta, write_info

GPUS = [Gpu(i, "NVIDIA A100 80GB PCIe", 81_920, 81_000, 0, "570.1") for i in range(2)]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "m7c.yaml"
    path.write_text("train: {steps: 50000, seq_len: 2048}\n")
    return path


@pytest.fixture
def info(tmp_path: Path, config_file: Path) -> dict:
    config = load_config(config_file, ["train.steps=300", "train.warmup_steps=10"])
    return describe_run(
        config,
        config_path=config_file,
        run_dir=tmp_path / "run",
        gpus=GPUS,
        processes=2,
        command=["torchrun", "--nproc_per_node=2", "a file.py"],
        repository=tmp_path,
    )


def test_the_parameter_count_is_the_true_one(info, config_file):
    assert info["parameters"] == parameter_count(load_config(config_file))
    assert info["model"] == "m7c_125m"


def test_tokens_per_step_count_every_gpu(info):
    assert info["tokens_per_step"] == 2 * 2048
    assert info["tokens_planned"] == 2 * 2048 * 300


def test_a_gpu_with_less_power_than_its_default_is_recorded(tmp_path, config_file):
    slow = replace(GPUS[1], speed=GpuSpeed(power_limit_w=250, default_power_limit_w=300))
    info = describe_run(
        load_config(config_file),
        config_path=config_file,
        run_dir=tmp_path,
        gpus=[GPUS[0], slow],
        processes=2,
        command=[],
        repository=tmp_path,
    )
    assert info["gpus"][1] == "NVIDIA A100 80GB PCIe, 81920 MiB, limited to 250 of 300 W"


def test_gpus_driver_and_launch_command_are_recorded(info):
    assert (info["gpu_count"], info["driver"]) == (2, "570.1")
    assert info["gpus"] == ["NVIDIA A100 80GB PCIe, 81920 MiB"] * 2
    assert info["launch_command"] == "torchrun --nproc_per_node=2 'a file.py'"


def test_no_address_of_copies_is_recorded(tmp_path: Path, config_file: Path) -> None:
    config_file.write_text("copy: {to: 'me@nas:runs'}\n")
    command = ["tamis", "run", "copy.to=me@nas:runs", "--from", "me@nas:runs", "--from=me@nas:runs", "train.steps=3"]
    info = describe_run(
        load_config(None), config_path=config_file, run_dir=tmp_path, gpus=[], processes=1, command=command
    )
    assert "nas" not in str(info) and info["launch_command"].endswith("'--from=…' train.steps=3")


def test_each_changed_key_is_recorded_with_both_values(info):
    assert info["config_changes"] == ["train.steps: 50000 → 300", "train.warmup_steps: 2000 → 10"]


def test_there_is_no_eta_before_anything_was_measured(info):
    assert info["eta"] == ETA_UNKNOWN


def test_a_written_file_reads_back_the_same(tmp_path, info):
    write_info(tmp_path / "run.info", info)
    assert read_info(tmp_path / "run.info") == info


def test_a_measured_eta_replaces_the_unknown_one_and_nothing_else(tmp_path, info):
    path = tmp_path / "run.info"
    write_info(path, info)
    write_eta(path, "2026-01-01T00:00:00Z")
    assert read_info(path) == info | {"eta": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize("content", [None, "", "[1, 2]", "a: [", "\x00"])
def test_a_missing_or_broken_file_reads_as_nothing(tmp_path, content):
    path = tmp_path / "run.info"
    if content is not None:
        path.write_text(content)
    assert read_info(path) == {}


def test_the_commit_and_edited_scripts_are_recorded(tmp_path):
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments], cwd=tmp_path, check=True)

    assert git_commit(tmp_path).startswith("unknown")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.sh").write_text("true\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "start")
    assert len(git_commit(tmp_path)) == 40
    assert altered_files(tmp_path) == []
    (tmp_path / "scripts" / "train.sh").write_text("false\n")
    assert altered_files(tmp_path) == ["scripts/train.sh differs from the commit"]
