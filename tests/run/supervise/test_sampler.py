"""The sampler of a launch: GPU samples and a measured ETA."""

import threading
import time

import pytest

from tamis.config import build_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.info import ETA_UNKNOWN, read_info, write_info
from tamis.run.supervise.sampler import eta_text, refresh_eta, sampled
from tamis.run.supervise.usage import append_usage, read_usage, usage_csv
from tests.run.fabricate import GPUS, Story, config_of, fabricate


def under_way(out, steps: int = 50):
    story = Story(steps=steps, planned_steps=1000, ending=None)
    return fabricate(out, story), config_of(out, story)


def test_gpus_are_sampled_for_as_long_as_the_block_runs(tmp_path):
    run, config = under_way(tmp_path)
    with sampled(config, 2, run, every_s=0.01, read=lambda: GPUS):
        while len(read_usage(usage_csv(run))) < 4:
            time.sleep(0.01)
    samples = read_usage(usage_csv(run))
    assert {sample.gpu for sample in samples} == {0, 1}
    assert samples[0].utilisation_percent == 96
    time.sleep(0.05)
    assert len(read_usage(usage_csv(run))) == len(samples)


@pytest.mark.parametrize(
    ("processes", "device", "sampled_gpus"), [(1, "auto", [0]), (2, "auto", [0, 1]), (2, "cpu", [])]
)
def test_only_gpus_that_the_run_uses_are_sampled(tmp_path, processes, device, sampled_gpus):
    run, config = under_way(tmp_path)
    config = build_config(config.model_dump() | {"runtime": {"device": device}})
    read = threading.Event()
    with sampled(config, processes, run, every_s=0.01, read=lambda: read.set() or GPUS):
        assert read.wait(60)
    assert sorted({sample.gpu for sample in read_usage(usage_csv(run))}) == sampled_gpus


def test_without_a_gpu_no_file_is_written(tmp_path):
    append_usage(RunDirectory(tmp_path), [])
    assert not usage_csv(RunDirectory(tmp_path)).exists()


def test_the_eta_is_measured_and_reaches_both_copies_of_run_info(tmp_path):
    run, config = under_way(tmp_path / "out")
    launched = tmp_path / "train_runs" / "m7c_1"
    launched.mkdir(parents=True)
    info = read_info(run.run_info) | {"run_dir": str(launched)}
    write_info(run.run_info, info)
    write_info(launched / "run.info", info)
    refresh_eta(run, config, 2)
    for path in (run.run_info, launched / "run.info"):
        assert "in 7:55 at 1,024 tok/s measured up to step 50" in read_info(path)["eta"]


def test_before_three_steps_are_timed_the_eta_stays_unknown(tmp_path):
    run, config = under_way(tmp_path, steps=2)
    refresh_eta(run, config, 2)
    assert read_info(run.run_info)["eta"] == ETA_UNKNOWN


@pytest.mark.parametrize("ending", ["done", "halted", "failed"])
def test_an_ended_run_has_its_ending_in_place_of_an_eta(tmp_path, ending):
    run = fabricate(tmp_path, ending=ending)
    assert eta_text(read_heartbeats(run.heartbeat(0)), 512, 60).startswith(f"{ending} at step 60, 20")
