"""gpu_usage.csv, and the note on a GPU that heat or a fault of the machine slows down."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tamis.run.checks.evidence import read_evidence
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import GpuSpeed
from tamis.run.handover.report import report_page
from tamis.run.limits import Limits
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import snapshot_text
from tamis.run.monitor.web.page import page_state
from tamis.run.supervise import usage
from tamis.run.supervise.usage import UsageSample, append_usage, read_usage, slowed_gpus, usage_csv
from tamis.run.supervise.watchdog import Watchdog
from tests.run.fabricate import GPUS, Story, fabricate

UNDER_WAY = Story(steps=30, planned_steps=1000, ending=None, ends_now=True, pid=os.getpid())
FAST = GpuSpeed(1980, 1980, 640, 700, 700, 61)
HOT = replace(FAST, clock_mhz=1200, temperature_c=88, slowed_by=("heat", "power limit"))


def samples(gpu: int, *slowed_by: str, seconds: int = 60, before: float = 0.0) -> list[UsageSample]:
    """One a second up to `before` seconds ago, where now is 1000."""
    times = [1000.0 - before - second for second in range(seconds)][::-1]
    return [UsageSample(ts, gpu, 1, 2, 90, 1200, 640, 88, slowed_by) for ts in times]


def write_usage(run: RunDirectory, speeds: list[GpuSpeed], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample a second of these GPUs over the last 50 seconds."""
    now = time.time()
    for second in range(50):
        monkeypatch.setattr(usage.time, "time", lambda second=second: now - 50 + second)
        append_usage(run, [replace(gpu, speed=speed) for gpu, speed in zip(GPUS, speeds, strict=True)])
    monkeypatch.undo()


def test_a_sample_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    unknown = replace(GPUS[1], utilisation_percent=None)
    append_usage(run, [replace(GPUS[0], speed=HOT), unknown])
    first, second = read_usage(usage_csv(run))
    assert first == UsageSample(first.ts, 0, 21_920, 81_920, 96, 1200, 640, 88, ("heat", "power limit"))
    assert second == UsageSample(second.ts, 1, 21_920, 81_920, None)


def test_rows_of_an_earlier_version_are_read_and_damaged_ones_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    rows = ["ts,gpu,used_mib,total_mib,utilisation_percent", "1780000010.0,0,1,2,90", "1780000011.0,0,1,2,"]
    damaged = ["1780000", "1780000012.0,0,1,2,90,fast,640,61,", f"1780000012.0,0,1,2,{'9' * 400}", "a,b"]
    usage_csv(run).write_text("\n".join([*rows, *damaged]) + "\n")
    earlier = GrowingFiles()
    before = earlier.usage(run)
    append_usage(run, [replace(GPUS[0], speed=FAST)])
    lines = usage_csv(run).read_text().splitlines()
    assert lines[0] == usage.HEADER and {line.count(",") for line in lines} == {usage.HEADER.count(",")}
    old, silent, new = read_usage(usage_csv(run))
    assert before == [old, silent] and earlier.usage(run) == [old, silent, new]
    assert (old.utilisation_percent, old.clock_mhz, old.slowed_by) == (90, None, ())
    assert (silent.utilisation_percent, new.clock_mhz, new.power_w) == (None, 1980, 640)
    assert GrowingFiles().usage(run) == [old, silent, new]


def test_a_file_that_is_too_long_loses_its_older_half_and_an_earlier_version_s_loses_nothing(
    tmp_path, monkeypatch
) -> None:
    run = RunDirectory(tmp_path)
    rows = [f"{1780000010 + second}.0,0,1,2,90" for second in range(100)]
    usage_csv(run).write_text("\n".join(["ts,gpu,used_mib,total_mib,utilisation_percent", *rows]) + "\n")
    monkeypatch.setattr(usage, "MAX_BYTES", usage_csv(run).stat().st_size)
    append_usage(run, GPUS[:1])
    assert len(read_usage(usage_csv(run))) == 101  # longer now, by the new columns
    append_usage(run, GPUS[:1])
    assert 40 < len(kept := read_usage(usage_csv(run))) < 60
    assert kept[-2].used_mib == kept[-1].used_mib == GPUS[0].used_mib


@pytest.mark.parametrize(
    ("recent", "shown"),
    [
        (samples(0, "heat"), "GPU 0 by heat (1,200 MHz, 88 °C)."),
        (samples(0) + samples(3, "power brake", "hardware protection"), "GPU 3 by power brake and hardware protection"),
        (samples(0, "heat") + samples(1, "power brake"), "GPU 0 by heat (1,200 MHz, 88 °C); GPU 1 by power brake"),
        (samples(0, "heat", seconds=31) + samples(0, seconds=29, before=31), "GPU 0 by heat"),
    ],
)
def test_a_gpu_slowed_down_for_most_of_a_minute_is_named(recent: list[UsageSample], shown: str) -> None:
    (alarm,) = slowed_gpus(recent, now=1000.0)
    assert (alarm.kind, alarm.severity) == ("slowed_gpu", "note")
    assert f"slowed down: {shown}" in alarm.reason and "Ask for cooling" in alarm.reason


@pytest.mark.parametrize(
    "recent",
    [
        [],
        samples(0, "power limit", "application clocks"),  # what a busy GPU and a setting do
        samples(0, "heat", seconds=29) + samples(0, seconds=31, before=29),
        samples(0, "heat", seconds=20),  # the run has just begun
        samples(0, "heat", before=61),  # and is over
    ],
    ids=["nothing", "normal", "for less than half a minute", "few samples", "long ago"],
)
def test_a_gpu_that_is_slow_for_other_reasons_or_a_short_time_is_not_named(recent: list[UsageSample]) -> None:
    assert slowed_gpus(recent, now=1000.0) == []


def test_the_watchdog_notes_it_twice_a_shift_at_most_and_the_monitor_shows_it(tmp_path: Path, monkeypatch) -> None:
    run = fabricate(tmp_path, UNDER_WAY)
    write_usage(run, [FAST, HOT], monkeypatch)
    uptime = [0.0]
    watchdog = Watchdog(run, Limits(), clock=lambda: uptime[0])
    assert [alarm.reason for alarm in watchdog.look() if alarm.kind == "slowed_gpu"] == [
        "slowed down: GPU 1 by heat (1,200 MHz, 88 °C). Ask for cooling, or for another machine; of several GPUs the "
        "slowest sets the speed of all"
    ]
    for uptime[0], again in ((3600.0, 0), (7 * 3600.0, 1)):
        assert [alarm.kind for alarm in watchdog.look()].count("slowed_gpu") == again
    snapshot = read_snapshot(tmp_path, gpus=[replace(GPUS[0], speed=FAST), replace(GPUS[1], speed=HOT)])
    assert [alert.level for alert in snapshot.alerts if "GPU 1 by heat" in alert.text] == ["note"]
    text = snapshot_text(snapshot)
    memory = "21.4/80.0 GiB"
    assert f"GPU 0  busy  96%  {memory}  61 °C  1,980/1,980 MHz  640/700 W  NVIDIA" in text
    assert f"GPU 1  busy  95%  slowed by heat  {memory}  88 °C  1,200/1,980 MHz  640/700 W  NVIDIA" in text


def test_a_long_file_keeps_as_many_older_samples_of_each_gpu(tmp_path: Path, monkeypatch) -> None:
    run, growing = RunDirectory(tmp_path), GrowingFiles()
    monkeypatch.setattr("tamis.run.monitor.growing.MOST_ROWS", 400)
    for _ in range(1000):
        append_usage(run, GPUS)
        kept = growing.usage(run)
    older = kept[: len(kept) // 2]
    shares = [sum(sample.gpu == gpu.index for sample in older) / len(older) for gpu in GPUS]
    assert len(GPUS) == 2 and all(0.35 < share < 0.65 for share in shares)


def test_report_and_live_page_draw_clock_and_power(tmp_path: Path, monkeypatch) -> None:
    run = fabricate(tmp_path, UNDER_WAY)
    page = report_page(read_evidence(run), {})
    assert "GPU clock" not in page  # nothing was sampled
    write_usage(run, [FAST, HOT], monkeypatch)
    page = report_page(read_evidence(run), {})
    titles = [chart["title"] for chart in page_state(tmp_path, GrowingFiles())["charts"]]
    for title in ("GPU utilisation", "GPU clock", "GPU power"):
        assert title in page and title in titles
