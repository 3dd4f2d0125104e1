"""The origin that every bench document names, and what is left of one that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tamis.bench import attention, document, paths, train
from tamis.bench.document import begin_document, exit_code, kept_when_interrupted
from tamis.run.files.hardware import GpuLost, GpuSpeed
from tamis.run.files.info import measured_commit
from tamis.train.guards import Anomaly
from tests.cli.typed import typed
from tests.run.fabricate import GPUS
from tests.train.processes import tiny_config

CPU = torch.device("cpu")


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["in the foreground", "in the background"])
def handlers(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The handlers of TERM and INT before the bench; a program that a script runs in the background ignores INT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield signal.getsignal(signal.SIGTERM), request.param
    signal.signal(signal.SIGINT, before)


def test_a_document_has_what_a_published_figure_must_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "train", "my config.yaml", "--length", "64", "notify.to=https://host/secret"]
    words.append("cost.on_end=[curl, -H, Authorization: Bearer sk-secret-of-somebody]")
    monkeypatch.setattr(document.sys, "argv", ["/src/tamis/__main__.py", *words])
    monkeypatch.setenv("TAMIS_TILES", "off")
    facts = begin_document("train", CPU)
    assert facts["variables"]["TAMIS_TILES"] == "off"
    assert facts["command"] == "tamis bench train 'my config.yaml' --length 64"
    assert (facts["bench"], facts["torch"], len(facts["date"])) == ("train", torch.__version__, 10)
    assert facts["device"].startswith("CPU") and facts["commit"]


def test_a_commit_with_changes_in_the_package_is_marked(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "tamis").mkdir()
    (tmp_path / "tamis" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "notes.txt").write_text("not of the package")
    assert measured_commit(tmp_path) == commit
    (tmp_path / "tamis" / "a.py").write_text("2")
    assert measured_commit(tmp_path) == f"{commit}-dirty"


def test_an_installed_package_names_its_version_and_no_commit_of_the_folder_it_lies_in(monkeypatch, tmp_path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(document.tamis, "__file__", str(tmp_path / "site-packages" / "tamis" / "__init__.py"))
    assert begin_document("train", CPU)["commit"] == f"tamis {document.tamis.__version__}"


def test_a_gpu_below_its_usual_power_is_reported_before_the_first_row(monkeypatch, capsys) -> None:
    slow = GpuSpeed(power_limit_w=350, default_power_limit_w=700)
    monkeypatch.setattr(document, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(document, "read_gpus", lambda: [GPUS[0], replace(GPUS[1], speed=slow)])
    facts = begin_document("train", torch.device("cuda", 1))
    assert (facts["driver"], facts["power_limit_w"], facts["default_power_limit_w"]) == ("570.1", 350, 700)
    assert "this GPU is limited to 350 of 700 W" in capsys.readouterr().out
    begin_document("train", torch.device("cuda"))
    assert capsys.readouterr().out == ""


def test_a_bench_needs_no_answer_of_the_driver(monkeypatch) -> None:
    def lost() -> list:
        raise GpuLost("GPU 1 does not answer")

    monkeypatch.setattr(document, "device_name", lambda device: "NVIDIA H200")
    for read in (lost, list):
        monkeypatch.setattr(document, "read_gpus", read)
        assert begin_document("train", torch.device("cuda", 0))["device"] == "NVIDIA H200"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_bench_prints_the_rows_it_has(number: int, handlers, monkeypatch, capsys) -> None:
    measure_length = attention.measure_length

    def interrupted(shape, length, *words):
        if length == 96:
            os.kill(os.getpid(), number)
        return measure_length(shape, length, *words)

    monkeypatch.setattr(attention, "measure_length", interrupted)
    monkeypatch.setattr(attention.branches, "parts", lambda *args: [])
    words = ["--shape", "m7c", "--length", "64", "--length", "96", "--tokens", "96", "--repeats", "1"]
    assert typed("bench", "attention", *words, "--device", "cpu") == 130
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["interrupted"] and {row["length"] for row in last["rows"]} == {64}
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def measure_steps(bench: ModuleType, folder: Path, monkeypatch, proof: Callable[[], None]) -> dict[str, Any]:
    """The document of a bench of training steps, with this in place of the proof that its kernels are right."""
    monkeypatch.setattr(bench, "require_right_attention", lambda config, device: proof())
    config = tiny_config(folder)
    if bench is train:
        return train.measure_training(config, [32], tokens=64, steps=1, warmup=0, with_data=False)
    monkeypatch.setattr(paths, "why_no_kernels", lambda *shape: None)
    code = paths.compare(config, 1, 0, folder / "results")
    (written,) = (folder / "results").iterdir()
    found: dict[str, Any] = json.loads(written.read_text())
    assert code == exit_code(found)
    return found


@pytest.mark.parametrize("bench", [train, paths])
def test_a_bench_of_training_steps_reports_nothing_of_wrong_kernels(bench, tmp_path, monkeypatch) -> None:
    def disagree() -> None:
        raise Anomaly("attention_mismatch", "window dq")

    with pytest.raises(Anomaly, match="window dq"):
        measure_steps(bench, tmp_path, monkeypatch, disagree)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("bench", [train, paths])
def test_an_interrupted_bench_of_training_steps_is_marked(bench, tmp_path, monkeypatch) -> None:
    done = measure_steps(bench, tmp_path, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (done["interrupted"], done["rows"]) == (True, [])


def test_a_bench_that_ends_by_itself_is_not_marked_in_any_thread() -> None:
    facts: dict[str, object] = {}

    def bench() -> None:
        with kept_when_interrupted(facts):
            facts["rows"] = 1

    bench()
    assert (facts.pop("rows"), facts, exit_code(facts)) == (1, {}, 0)
    thread = threading.Thread(target=bench)
    thread.start()
    thread.join()
    assert facts == {"rows": 1}
