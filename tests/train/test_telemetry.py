"""What a run writes about its steps: rows and beats mean what their names say, and TensorBoard cannot end a run."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tamis.config import load_config
from tamis.config.size import flops_per_token
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tamis.train.console import Console
from tamis.train.distributed import Ranks
from tamis.train.metrics import AsyncReadback
from tamis.train.mfu import Utilisation, peak_tflops
from tamis.train.telemetry import FinishedStep, LaunchedStep, Telemetry

CPU = torch.device("cpu")
GATES = [[0.2, 0.3, 0.5, 1.0, 0.0], [0.1, 0.1, 0.8, 0.6, 0.25]]


def telemetry(folder: Path, *overrides: str) -> Telemetry:
    config = load_config(None, ["train.steps=20", "train.log_every=5", *overrides])
    run = RunDirectory(folder).create()
    opened = Telemetry(config, run, Ranks(0, 1, CPU), Console(rank=1))
    opened.open()
    opened.resume_at(0)
    return opened


def report(step: int) -> FinishedStep:
    return FinishedStep(LaunchedStep(step, 1e-4, 0.01), loss=3.0 + step, grad_norm=0.5, gates=GATES)


def test_one_row_per_logged_step_and_one_beat_per_step(tmp_path: Path) -> None:
    opened = telemetry(tmp_path)
    for step in range(1, 12):
        opened.finished(report(step))
    rows = list(csv.DictReader((tmp_path / "training.csv").open()))
    assert [int(row["step"]) for row in rows] == [1, 5, 10]
    assert float(rows[1]["loss"]) == 8.0 and float(rows[1]["lr"]) == 1e-4 and float(rows[1]["toks_per_s"]) > 0
    beats = [beat for beat in read_heartbeats(tmp_path / "heartbeat_rank0.jsonl") if beat.phase == "step_end"]
    assert [beat.step for beat in beats] == list(range(1, 12))


def test_a_beat_carries_the_gates_of_every_layer(tmp_path: Path) -> None:
    opened = telemetry(tmp_path)
    opened.finished(report(1))
    beat = read_heartbeats(tmp_path / "heartbeat_rank0.jsonl")[-1]
    assert beat.gate_shares == [[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]
    assert (beat.gate_entropy_mean, beat.gate_entropy_min, beat.gate_collapse_fraction) == (0.8, 0.6, 0.125)
    assert beat.gpu_mem_alloc_gib is None and beat.mfu is None  # a CPU has neither, and none is made up


def test_time_spent_saving_is_not_counted_as_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("tamis.train.telemetry.time.monotonic", lambda: clock[0])
    opened = telemetry(tmp_path, "train.log_every=2")
    for step in (1, 2, 3, 4):
        clock[0] += 1.0
        opened.finished(report(step))
        if step == 3:
            clock[0] += 500.0  # a slow checkpoint
            opened.pause()
    rates = [float(row["toks_per_s"]) for row in csv.DictReader((tmp_path / "training.csv").open())]
    assert rates == [2048.0, 2048.0, 2048.0]


def test_csv_logs_can_be_turned_off(tmp_path: Path) -> None:
    telemetry(tmp_path, "train.csv=false").finished(report(5))
    assert not (tmp_path / "training.csv").exists()


def test_an_unwritable_tensorboard_directory_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("a file where the directory should be")
    opened = telemetry(tmp_path)
    opened.finished(report(5))
    assert opened.loggers == []
    assert (tmp_path / "training.csv").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA H200", 989.0), ("NVIDIA L40S", 362.0), ("Foo 9", None)],
)
def test_an_unknown_gpu_gets_no_peak_never_a_wrong_one(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_a_cpu_has_no_mfu() -> None:
    assert Utilisation(load_config(None), CPU).at(1e6) is None


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_mfu_counts_the_lengths_of_the_documents_of_a_step(tmp_path: Path, attention: str) -> None:
    config = load_config(None, ["train.seq_len=4096", f"model.attention={attention}"])
    of_seq_len, lengths = Utilisation(config, CPU), [4096, 1, 1000, 1000, 2095]
    of_seq_len.peak_tflops = 1.0

    def flops(length: int) -> float:
        return flops_per_token(load_config(None, [f"train.seq_len={length}", f"model.attention={attention}"]))

    assert of_seq_len.at(1e6) == of_seq_len.at(1e6, [4096] * 3) == pytest.approx(flops(4096) * 1e-6)
    expected = sum(flops(length) * length for length in lengths) / sum(lengths) * 1e-6
    assert of_seq_len.at(1e6, lengths) == pytest.approx(expected)
    assert expected < of_seq_len.at(1e6)
    opened = telemetry(tmp_path)
    opened.utilisation.peak_tflops = 1.0
    for step, of_step in ((5, [512]), (6, [128] * 4)):
        finished = replace(report(step), launched=LaunchedStep(step, 1e-4, 0.01, lengths=of_step))
        opened.last_finish -= 1.0
        opened.finished(finished)
    whole, in_documents = (beat for beat in read_heartbeats(tmp_path / "heartbeat_rank0.jsonl") if beat.mfu)
    assert in_documents.mfu * in_documents.dt_step_s < whole.mfu * whole.dt_step_s


def test_the_flops_of_a_length_schedule_are_the_mean_of_its_lengths() -> None:
    schedule = load_config(None, ["train.seq_len=2048", "train.length_schedule=[512, 2048]"])
    each = [flops_per_token(load_config(None, [f"train.seq_len={length}"])) for length in (512, 2048)]
    assert flops_per_token(schedule) == pytest.approx(sum(each) / 2)


def test_each_step_is_recorded_when_the_device_finishes_it_not_when_all_have():
    readback: AsyncReadback[int] = AsyncReadback(torch.device("cpu"))
    order: list[str] = []
    for step in (1, 2):
        event = SimpleNamespace(synchronize=lambda step=step: order.append(f"waited for {step}"))
        readback._pending.append((step, torch.zeros(1), event))
    for step, _ in readback.pop(keep=0):
        order.append(f"recorded {step}")
    assert order == ["waited for 1", "recorded 1", "waited for 2", "recorded 2"]
