"""The preflight refuses with evidence and remedy, and no child process can block it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tamis.config import Config, build_config
from tamis.run.checks import machine, preflight
from tamis.run.checks.machine import MACHINE_CHECKS, Subject
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import Gpu, GpuSpeed
from tamis.run.files.lock import RunLock

FREE_GPU = Gpu(0, "Card 80", 81_920, 81_000, 0, "580.65.06")


def small_config(out_dir: Path, **runtime) -> Config:
    return build_config(
        {
            "model": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_ff": 64},
            "data": {"dataset": "sample", "tokenizer": "byte"},
            "runtime": {"device": "cpu", "precision": "fp32", **runtime},
            "train": {"steps": 4, "warmup_steps": 1, "seq_len": 64, "out_dir": str(out_dir)},
        }
    )


def subject(tmp_path: Path, gpus=(), **runtime) -> Subject:
    config = small_config(tmp_path / "out", **runtime)
    config_file = tmp_path / "config.yaml"
    config_file.write_text(config.to_yaml())
    return Subject(config, config_file, list(gpus))


def result_of(name: str, of: Subject):
    return next(criterion for criterion in MACHINE_CHECKS if criterion.name == name).apply(of)


def answer(returncode: int = 0, stdout: str = "", stderr: str = ""):
    return lambda command, name: subprocess.CompletedProcess(command, returncode, stdout, stderr)


def test_this_machine_is_ready_for_a_small_run_and_each_line_is_numbered(tmp_path):
    lines: list[str] = []
    assert preflight.run_preflight(small_config(tmp_path), gpus=[], quick=True, emit=lines.append) == 0
    assert [int(line[:2]) for line in lines[:-1]] == list(range(1, len(MACHINE_CHECKS) + 1))
    assert lines[-1].startswith("preflight: GO")


def test_the_result_is_stored_in_the_run_directory(tmp_path):
    preflight.run_preflight(small_config(tmp_path), gpus=[], quick=True, emit=lambda line: None)
    stored = json.loads((tmp_path / "preflight.json").read_text())
    assert stored["go"] is True
    assert {finding["name"] for finding in stored["findings"]} == {check.name for check in MACHINE_CHECKS}


def test_a_failed_check_makes_the_exit_code_one_and_prints_the_remedy(tmp_path):
    lines: list[str] = []
    config = small_config(tmp_path, device="cuda")
    assert preflight.run_preflight(config, gpus=[], quick=True, emit=lines.append) == 1
    assert any("FAIL" in line and "runtime.device" in line and "→" in line for line in lines)
    assert "NO-GO" in lines[-1]


def test_gpu_checks_do_not_apply_without_a_gpu(tmp_path):
    found = {check.name: check.apply(subject(tmp_path)).status for check in MACHINE_CHECKS}
    assert found["driver matches torch"] == found["GPUs are there and free"] == "not applicable"


@pytest.mark.parametrize(
    ("cuda", "driver", "status"),
    [("13.0", "580.65.06", "pass"), ("13.0", "570.1", "fail"), ("12.8", "535.2", "pass"), (None, "580.1", "fail")],
)
def test_a_driver_older_than_torch_needs_is_refused(tmp_path, monkeypatch, cuda, driver, status):
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: cuda)
    gpu = Gpu(0, "Card", 81_920, 81_000, 0, driver)
    assert result_of("driver matches torch", subject(tmp_path, [gpu], device="auto")).status == status


def test_a_gpu_in_use_by_another_process_is_refused_by_name(tmp_path):
    busy = Gpu(1, "Card 80", 81_920, 60_000, 90, "580.1")
    found = result_of("GPUs are there and free", subject(tmp_path, [FREE_GPU, busy], device="auto"))
    assert found.status == "fail"
    assert "1: Card 80 60000 of 81920 MiB free" in found.evidence
    assert "nvidia-smi" in found.remedy


def test_a_gpu_that_is_slower_than_others_of_its_model_is_named(tmp_path):
    slow = replace(FREE_GPU, speed=GpuSpeed(power_limit_w=350, default_power_limit_w=700, slowed_by=("heat",)))
    found = result_of("GPUs are there and free", subject(tmp_path, [FREE_GPU, slow], device="auto"))
    assert found.status == "pass"
    assert found.evidence.endswith("81920 MiB free, limited to 350 of 700 W, slowed by heat")


def test_production_on_two_cpu_cores_is_refused_unless_the_cpu_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    name = "the device can finish the run"
    m7c = build_config({"train": {"steps": 50_000, "out_dir": str(tmp_path)}})
    found = result_of(name, Subject(m7c, tmp_path / "c.yaml", []))
    assert (found.status, "50,000 steps" in found.evidence, "GPU" in found.remedy) == ("fail", True, True)
    asked = m7c.model_copy(update={"runtime": m7c.runtime.model_copy(update={"device": "cpu"})})
    assert result_of(name, Subject(asked, tmp_path / "c.yaml", [])).status == "not measured"
    assert result_of(name, subject(tmp_path)).status == "pass"
    assert result_of(name, Subject(m7c, tmp_path / "c.yaml", [FREE_GPU])).status == "not applicable"


def test_too_little_disk_is_refused_with_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_disk_mib", lambda path: 100)
    found = result_of("disk holds the checkpoints", subject(tmp_path))
    assert found.status == "fail"
    assert "100 MiB free" in found.evidence
    assert "train.keep_checkpoints" in found.remedy


def test_keeping_every_checkpoint_needs_space_for_all_of_them(tmp_path):
    of = subject(tmp_path)
    train = of.config.train.model_copy(update={"keep_checkpoints": 0, "steps": 50_000, "save_every": 5_000})
    of = Subject(of.config.model_copy(update={"train": train}), of.config_file, [])
    assert "10 checkpoints" in result_of("disk holds the checkpoints", of).evidence


def test_a_file_in_place_of_the_output_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("not a folder")
    found = result_of("out_dir can be written", subject(tmp_path))
    assert found.status == "fail"
    assert "train.out_dir" in found.remedy
    assert result_of("out_dir has no other owner", subject(tmp_path)).status == "pass"  # the owner is not the problem


def test_a_run_directory_with_a_living_owner_is_refused(tmp_path):
    directory = RunDirectory(tmp_path / "out").create()
    with RunLock(directory.lock) as lock:
        lock.acquire("launch")
        assert result_of("out_dir has no other owner", subject(tmp_path)).status == "fail"
    assert result_of("out_dir has no other owner", subject(tmp_path)).status == "pass"


def test_a_clock_before_this_program_existed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.time, "time", lambda: 1_000.0)
    assert result_of("clock is sane", subject(tmp_path)).status == "fail"


def test_a_low_limit_on_open_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (256, 256))
    found = result_of("process limits", subject(tmp_path))
    assert found.status == "fail"
    assert "ulimit" in found.remedy


def test_a_child_that_hangs_is_ended_and_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(preflight.CHILD_TIMEOUT_S, "data", 0.2)
    said = preflight._child([sys.executable, "-c", "import time; time.sleep(600)"], "data")
    assert isinstance(said, str)
    assert "no answer within 0.2 s" in said


def test_each_result_of_tamis_verify_becomes_a_line(tmp_path, monkeypatch):
    results = [
        {"name": "attention out", "passed": True, "measured": 1e-6, "limit": 1e-5, "detail": ""},
        {"name": "causality", "passed": False, "measured": 0.3, "limit": 0.0, "detail": "layer 2"},
    ]
    monkeypatch.setattr(preflight, "_child", answer(1, "a warning of a library\n" + json.dumps({"checks": results})))
    kernels, causality = preflight.model_is_right(subject(tmp_path))
    assert (kernels.status, causality.status) == ("pass", "fail")
    assert "0.3" in causality.evidence
    assert "layer 2" in causality.evidence


@pytest.mark.parametrize(
    "stdout", ["", "[]", "{}", '{"checks": []}', "not json", '{"checks": [{"name": "attention out"}]}']
)
def test_a_verification_without_readable_results_fails(tmp_path, monkeypatch, stdout):
    monkeypatch.setattr(preflight, "_child", answer(0, stdout))
    assert [finding.status for finding in preflight.model_is_right(subject(tmp_path))] == ["fail"]


def test_a_verification_that_crashes_after_good_results_fails(tmp_path, monkeypatch):
    results = [{"name": "attention out", "passed": True, "measured": 0, "limit": 1, "detail": ""}]
    monkeypatch.setattr(preflight, "_child", answer(139, json.dumps({"checks": results})))
    assert "fail" in [finding.status for finding in preflight.model_is_right(subject(tmp_path))]


def test_collectives_are_tried_only_across_several_gpus(tmp_path, monkeypatch):
    assert preflight.collectives_work(subject(tmp_path, [FREE_GPU])).status == "not applicable"
    monkeypatch.setattr(preflight, "_child", answer(1, "", "ncclSystemError: Cannot assign requested address"))
    found = preflight.collectives_work(subject(tmp_path, [FREE_GPU, FREE_GPU]))
    assert found.status == "fail"
    assert "ncclSystemError" in found.evidence


def test_kernel_agreement_does_not_apply_without_kernels(tmp_path, monkeypatch):
    results = [{"name": "causality", "passed": True, "measured": 0.0, "limit": 0.0, "detail": ""}]
    monkeypatch.setattr(preflight, "_child", answer(0, json.dumps({"checks": results})))
    assert [finding.status for finding in preflight.model_is_right(subject(tmp_path))] == ["not applicable", "pass"]


def test_the_real_data_path_is_tried_in_a_child_which_reads_no_variables_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NSA_LR", "fast")  # the resolved config holds what variables set
    found = preflight.data_is_reachable(subject(tmp_path))
    assert found.status == "pass"
    assert "held-out" in found.evidence


def test_missing_data_is_refused_with_the_message_of_the_loader(tmp_path):
    of = subject(tmp_path)
    data = of.config.data.model_copy(update={"dataset": "fineweb_edu_local", "local_path": str(tmp_path / "nowhere")})
    of.config_file.write_text(of.config.model_copy(update={"data": data}).to_yaml())
    found = preflight.data_is_reachable(of)
    assert found.status == "fail"
    assert "nowhere" in found.evidence
