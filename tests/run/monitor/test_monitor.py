"""The monitor works at any time: before the run, during it, after it, and after a crash."""

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Static

from tamis.run.checks.runbooks import judge_run
from tamis.run.eta import duration_text, measure_progress
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import Alarm, EventLog, write_anomaly
from tamis.run.files.halt import HaltFile
from tamis.run.files.hardware import GpuLost
from tamis.run.files.heartbeat import Heartbeat, read_heartbeats
from tamis.run.files.lock import RunLock
from tamis.run.files.records import Sample, SampleLog
from tamis.run.handover.curves import thinned
from tamis.run.locate import NoSuchRun, existing_run
from tamis.run.monitor import snapshot as monitor_snapshot
from tamis.run.monitor.command import show_run
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.plots import Curves
from tamis.run.monitor.ranks import rank_view
from tamis.run.monitor.screen import MonitorScreen, Panel
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.text import newest_events_first, rank_lines, snapshot_text
from tests.run.fabricate import GPUS, Story, fabricate

STARTING = "no heartbeat yet: the launch is running its checks or starting workers"


def live(out: Path, **changes) -> RunDirectory:
    """A run that is under way, with this process as its worker."""
    return fabricate(out, Story(steps=50, planned_steps=1000, ending=None, ends_now=True, pid=os.getpid(), **changes))


def text_of(run_dir: Path) -> str:
    return snapshot_text(read_snapshot(run_dir, gpus=[]))


def test_the_state_is_missing_before_the_directory_exists(tmp_path):
    snapshot = read_snapshot(tmp_path / "later", gpus=[])
    assert snapshot.state == "missing"
    assert "does not exist yet" in snapshot_text(snapshot)


def test_the_state_is_starting_before_the_first_heartbeat(tmp_path):
    assert read_snapshot(tmp_path, gpus=[]).state == "starting"


def test_a_refused_launch_is_not_shown_as_starting(tmp_path):
    (tmp_path / "preflight.json").write_text('{"verdict": "NO-GO (2 failed)"}')
    expected = "no heartbeat yet, and no launch is under way here; the last preflight was NO-GO (2 failed)"
    assert read_snapshot(tmp_path, gpus=[]).headline == expected
    assert show_run(tmp_path, once=True) == 1  # failed
    with RunLock(RunDirectory(tmp_path).lock) as lock:
        lock.acquire("launch")
        assert read_snapshot(tmp_path, gpus=[]).headline == STARTING


def test_a_launch_at_its_checks_is_shown_as_starting_or_restarting(tmp_path):
    out = RunDirectory(tmp_path / "out").create()
    with RunLock(out.launch_lock) as lock:
        lock.acquire("launch by phases")
        assert read_snapshot(out.path, gpus=[]).headline == STARTING
        assert existing_run(out.path).path == out.path
        fabricate(out.path, Story(steps=50, planned_steps=1000, ending=None))
        assert read_snapshot(out.path, gpus=[]).state == "restarting"
    assert read_snapshot(out.path, gpus=[]).state == "crashed"


def test_there_is_no_eta_before_the_first_step(tmp_path):
    live(tmp_path)
    run = RunDirectory(tmp_path)
    boots = [line for line in run.heartbeat(0).read_text().splitlines() if '"boot"' in line]
    run.heartbeat(0).write_text("\n".join(boots) + "\n")
    run.training_csv.unlink()
    snapshot = read_snapshot(tmp_path, gpus=[])
    assert (snapshot.state, snapshot.step, snapshot.progress.eta_s) == ("running", 0, None)
    assert "ETA unknown until measured" in snapshot_text(snapshot)


def test_a_run_under_way_shows_its_numbers(tmp_path):
    live(tmp_path)
    snapshot = read_snapshot(tmp_path, gpus=GPUS)
    assert snapshot.state == "running"
    assert (snapshot.step, snapshot.steps) == (50, 1000)
    assert snapshot.progress.eta_s == pytest.approx(950 * 0.5, rel=0.01)
    assert [view.rank for view in snapshot.ranks] == [0, 1]
    assert [gate.layer for gate in snapshot.gates] == [0, 1, 2, 3]
    assert snapshot.gates[0].likeness == 0.6
    assert text_of(tmp_path).partition("entropy")[2].splitlines()[1].split()[-4:] == ["0.900", "0.80", "0.40", "0.60"]
    assert snapshot.times.compute_s == pytest.approx(0.49)
    assert [saved.step for saved in snapshot.checkpoints] == [20, 40]
    text = snapshot_text(snapshot)
    for shown in ("loss 3.", "MFU 41.0%", "ETA 7:", "GPU 1  busy  95%", "fetch p50", "18.0/20.0"):
        assert shown in text


def test_the_samples_of_the_last_evaluation_are_shown(tmp_path):
    run = fabricate(tmp_path, steps=3)
    SampleLog(run.samples).append([Sample(1, "a", "old"), Sample(3, "Fellow", "citi\nzens"), Sample(3, "We", "the")])
    text = snapshot_text(read_snapshot(run.path, gpus=[]))
    assert "step 3: Fellow | citi zens\nstep 3: We | the" in text
    assert "old" not in text


@pytest.mark.parametrize("ending", ["done", "halted", "failed"])
def test_an_ended_run_has_its_ending_as_state_and_no_eta(tmp_path, ending):
    fabricate(tmp_path, ending=ending)
    snapshot = read_snapshot(tmp_path, gpus=[])
    assert snapshot.state == ending
    assert snapshot.progress.eta_s is None
    assert snapshot.training


def test_a_run_whose_workers_vanished_has_crashed(tmp_path):
    fabricate(tmp_path, ending=None)
    assert read_snapshot(tmp_path, gpus=[]).state == "crashed"


def test_resuming_is_offered_only_where_there_is_a_checkpoint(tmp_path):
    fabricate(tmp_path / "saved", ending=None)
    assert "checkpoint of step 60; launch again to resume" in text_of(tmp_path / "saved")
    for ending in (None, "halted"):
        fabricate(tmp_path / f"unsaved {ending}", ending=ending, save_every=1000)
        text = text_of(tmp_path / f"unsaved {ending}")
        assert "launch again to resume" not in text
        assert "there is no checkpoint, so a new launch starts at step 1" in text


def test_a_process_of_another_host_or_with_a_reused_pid_is_not_taken_for_this_one(tmp_path):
    run = live(tmp_path)
    beat = json.loads(run.heartbeat(0).read_text().splitlines()[-1])
    beats = {"reused": beat | {"started": beat["started"] - 1}, "remote": beat | {"host": "elsewhere:0", "pid": 1}}
    view = {name: rank_view(0, [Heartbeat.from_line(json.dumps(line))], beat["ts"] + 5) for name, line in beats.items()}
    assert (view["reused"].is_alive, view["remote"].is_alive) == (False, True)
    late = rank_view(0, [Heartbeat.from_line(json.dumps(beats["remote"]))], beat["ts"] + 10_000)
    assert not late.is_alive


def test_a_failed_save_is_an_alert_until_one_succeeds(tmp_path):
    run = live(tmp_path)
    beat = json.loads(run.heartbeat(0).read_text().splitlines()[-1]) | {"phase": "checkpoint", "ts": time.time()}
    with open(run.heartbeat(0), "a") as file:
        file.write(json.dumps(beat | {"save_error": "No space left on device"}) + "\n")
    alerts = [alert.text for alert in read_snapshot(tmp_path, gpus=[]).alerts]
    assert "the checkpoint of step 50 was not saved: No space left on device" in alerts
    with open(run.heartbeat(0), "a") as file:
        file.write(json.dumps(beat | {"ts": time.time()}) + "\n")
    assert any("not saved" in alert.text for alert in read_snapshot(tmp_path, gpus=[]).alerts), "the next one began"
    with open(run.heartbeat(0), "a") as file:
        file.write(json.dumps(beat | {"ts": time.time(), "phase": "step_start"}) + "\n")
    assert not any("not saved" in alert.text for alert in read_snapshot(tmp_path, gpus=[]).alerts)


def test_a_crash_under_a_living_supervisor_is_shown_as_restarting(tmp_path):
    run = fabricate(tmp_path, ending=None)
    with RunLock(run.lock) as lock:
        lock.acquire("launch")
        assert read_snapshot(tmp_path, gpus=[]).state == "restarting"
    assert read_snapshot(tmp_path, gpus=[]).state == "crashed"


@pytest.mark.parametrize("options", [{"once": True}, {"as_json": True}])
def test_text_and_json_refuse_a_directory_without_a_run(tmp_path, options):
    with pytest.raises(NoSuchRun, match="holds no run"):
        show_run(tmp_path, **options)


def test_a_silent_rank_is_an_alert_with_its_limit(tmp_path):
    live(tmp_path)
    assert read_snapshot(tmp_path, gpus=[]).alerts == []
    later = read_snapshot(tmp_path, gpus=[], now=time.time() + 3600)
    assert [alert.level for alert in later.alerts] == ["problem", "problem"]
    assert "rank 0 is silent for 36" in later.alerts[0].text


def test_halt_anomaly_and_unfinished_checkpoint_are_alerts_problems_first(tmp_path):
    run = fabricate(tmp_path)
    HaltFile(run.halt).request("the operator goes to lunch")
    write_anomaly(run, Alarm("gate_collapse", "halt", "the gates have collapsed"))
    run.manifest(40).unlink()
    alerts = read_snapshot(tmp_path, gpus=[]).alerts
    assert "gate_collapse" in alerts[0].text
    assert {"lunch" in alert.text or "step 40" in alert.text for alert in alerts[1:]} == {True}


def test_alerts_come_from_the_rules_of_the_watchdog(tmp_path):
    fabricate(tmp_path, entropy=0.1)
    assert any("gates have collapsed" in alert.text for alert in read_snapshot(tmp_path, gpus=[]).alerts)


def test_a_lost_gpu_is_an_alert_and_the_monitor_continues(tmp_path, monkeypatch):
    def lost():
        raise GpuLost("GPU 1 does not answer")

    monkeypatch.setattr(monitor_snapshot, "read_gpus", lost)
    live(tmp_path)
    assert read_snapshot(tmp_path).alerts[0].text == "GPU 1 does not answer"
    assert read_snapshot(tmp_path / "later").alerts


def test_the_monitor_follows_a_launch_into_its_phases_and_back(tmp_path):
    fabricate(tmp_path / "phases" / "phase1_20260101-000000", steps=5)
    assert read_snapshot(tmp_path, gpus=[]).launch_phase == 1
    assert "launch phase 1 of 3" in text_of(tmp_path)
    time.sleep(0.02)  # file times decide
    fabricate(tmp_path, steps=5)
    assert read_snapshot(tmp_path, gpus=[]).launch_phase is None


def test_broken_files_do_not_stop_the_monitor(tmp_path):
    run = fabricate(tmp_path, steps=5)
    for path in (run.heartbeat(0), run.training_csv, run.val_csv, run.events, run.run_info, run.config_yaml):
        with open(path, "ab") as file:
            file.write(b'\xff\xfe{"half": ')
    run.manifest(20).write_text("{")
    assert text_of(tmp_path)


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_million_rows_are_sampled_and_later_looks_read_only_what_is_new(tmp_path):
    run = live(tmp_path)
    rows = "".join(f"{step},{2 + 1000 / step:.6f},0.0002,1234.5\n" for step in range(1, 1_000_001))
    run.training_csv.write_text("step,loss,lr,toks_per_s\n" + rows)
    for path, times in ((run.heartbeat(0), 300), (run.events, 100_000)):
        path.write_bytes(path.read_bytes() * times)
    size = sum(path.stat().st_size for path in (run.training_csv, run.heartbeat(0), run.events))
    files, before = GrowingFiles(), bytes_read()
    snapshot = read_snapshot(tmp_path, gpus=[], files=files)
    assert bytes_read() - before < size / 4
    steps = [row.step for row in snapshot.training]
    assert steps == sorted(set(steps))
    assert (steps[0] < 1_000, steps[-1], len(steps) < 20_000) == (True, 1_000_000, True)
    with open(run.training_csv, "a") as file:
        file.write("1000001,2.0,0.0002,1234.5\n")
    before = bytes_read()
    assert read_snapshot(tmp_path, gpus=[], files=files).training[-1].step == 1_000_001
    assert bytes_read() - before < 1_000_000
    run.training_csv.write_text("step,loss,lr,toks_per_s\n1,2.0,0.1,5\n2,2.0,0.1,5\n")  # a fresh start
    assert [row.step for row in read_snapshot(tmp_path, gpus=[], files=files).training] == [1, 2]


NASTY = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\r\nFAKE LINE"


def test_terminal_escapes_from_a_run_are_shown_and_not_obeyed(tmp_path, capsys):
    run = fabricate(tmp_path / "out", ending="failed")
    beat = json.loads(run.heartbeat(0).read_text().splitlines()[-1])
    with open(run.heartbeat(0), "a") as file:
        file.write(json.dumps(beat | {"detail": NASTY}) + "\n")
    HaltFile(run.halt).request(NASTY)
    write_anomaly(run, Alarm("gate_collapse", "halt", NASTY))
    EventLog(run, by="watchdog", say=print).record("odd" + NASTY, NASTY)
    show_run(run.path, once=True)
    judge_run(run.path)
    shown = capsys.readouterr().out
    assert shown.count("evil") > 4
    assert not set(shown) & set("\x1b\x07\x9b\r\u202e")
    assert "\nFAKE" not in shown.partition("FAILED")[2]  # of the monitor and the judge
    snapshot = read_snapshot(run.path, gpus=[])

    async def screen() -> str:
        app = MonitorScreen(lambda: snapshot, every_s=3600)
        async with app.run_test(size=(160, 50)):
            panels = [*app.query(Panel), app.query_one("#status", Static), app.query_one("#alerts", Static)]
            return "".join(str(panel.render()) for panel in panels)

    assert not set(asyncio.run(screen())) & set("\x1b\x07\x9b\r\u202e")


def test_once_prints_text_and_a_crashed_run_gives_exit_code_one(tmp_path, capsys):
    fabricate(tmp_path / "good")
    fabricate(tmp_path / "bad", ending=None)
    assert show_run(tmp_path / "good", once=True) == 0
    assert show_run(tmp_path / "bad", once=True) == 1
    assert capsys.readouterr().out.startswith("DONE")


def test_json_output_is_valid_with_nan_and_infinity(tmp_path, capsys):
    run = fabricate(tmp_path)
    run.val_csv.write_text("step,loss,ppl\n20,nan,inf\n")
    show_run(tmp_path, as_json=True)
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["state"] == "done"
    assert document["validation"][0]["ppl"] == "inf"


@pytest.mark.parametrize(("size", "page"), [((80, 24), "ranks"), ((120, 24), "ranks"), ((160, 50), "all")])
def test_the_screen_shows_every_panel_that_fits(tmp_path, size, page):
    live(tmp_path)

    async def look() -> tuple[str, list[str]]:
        app = MonitorScreen(lambda: read_snapshot(tmp_path, gpus=GPUS), every_s=3600)
        async with app.run_test(size=size) as pilot:
            await pilot.press("2" if page == "ranks" else "0")
            await pilot.pause()
            shown = [str(w.border_title) for w in [*app.query(Panel), *app.query(Curves)] if w.display and w.region]
            return str(app.query_one("#status", Static).render()), shown

    status, shown = asyncio.run(look())
    assert status.startswith("RUNNING")
    if page == "ranks":
        assert shown == ["ranks", "step time"]
    else:
        assert len(shown) == 9


@pytest.mark.parametrize(("size", "whole"), [((80, 24), True), ((160, 50), True), ((120, 40), False)])
def test_the_pid_of_a_rank_is_never_cut(tmp_path, size, whole):
    live(tmp_path)

    async def room() -> int:
        app = MonitorScreen(lambda: read_snapshot(tmp_path, gpus=GPUS), every_s=3600)
        async with app.run_test(size=size) as pilot:
            await pilot.press("2")
            await pilot.pause()
            return app.query_one("#ranks", Panel).content_size.width

    lines = rank_lines(read_snapshot(tmp_path, gpus=GPUS))
    width = asyncio.run(room())
    assert lines[0].index("pid") + len("pid") < width
    assert not whole or max(map(len, lines)) <= width


def test_a_panel_too_small_for_all_events_shows_the_newest(tmp_path):
    run = live(tmp_path)
    EventLog(run, by="watchdog").record("slow", "the newest")
    assert newest_events_first(read_snapshot(tmp_path, gpus=[]))[0].endswith("the newest")


def test_the_screen_shows_a_run_that_starts_while_it_is_open(tmp_path):
    async def look() -> list[str]:
        app = MonitorScreen(lambda: read_snapshot(tmp_path / "out", gpus=[]), every_s=3600)
        async with app.run_test(size=(80, 24)) as pilot:
            states = [str(app.query_one("#status", Static).render()).split()[0]]
            live(tmp_path / "out")
            await pilot.press("r")
            await pilot.pause()
            return [*states, str(app.query_one("#status", Static).render()).split()[0]]

    assert asyncio.run(look()) == ["MISSING", "RUNNING"]


def test_in_a_real_terminal_it_draws_and_q_ends_it(tmp_path):
    fabricate(tmp_path, steps=5)
    code = f"from tamis.run.monitor.command import show_run; raise SystemExit(show_run({str(tmp_path)!r}))"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
    seen = b""
    while b"all steps are done" not in seen and select.select([ours], [], [], 60)[0]:
        seen += os.read(ours, 65536)
    assert b"all steps are done" in seen
    os.write(ours, b"q")
    while process.poll() is None:
        if select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 65536)  # a full terminal buffer would keep it from leaving
    assert process.returncode == 0
    os.close(ours)
    os.close(theirs)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(allow_nan=True, allow_infinity=True)), max_size=2000))
def test_thinning_keeps_few_points_and_the_last_one(points):
    few = thinned(points, most=50)
    finite = [point for point in points if abs(point[1]) < float("inf")]
    assert len(few) <= 50
    assert few[-1:] == finite[-1:]


def test_an_eta_ignores_restarts_and_jumping_clocks(tmp_path):
    run = live(tmp_path)
    ends = [beat for beat in read_heartbeats(run.heartbeat(0)) if beat.phase == "step_end"]
    jumped = [replace(beat, ts=beat.ts + 3600) if beat.step > 25 else beat for beat in ends]
    restarted = [replace(beat, pid=7, mono=beat.mono + 5000) if beat.step > 25 else beat for beat in ends]
    etas = [measure_progress(beats, 512, 1000).eta_s for beats in (ends, jumped, restarted)]
    assert etas == pytest.approx([etas[0]] * 3)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "unknown until measured"), (42, "0:42"), (11_112, "3:05:12"), (184_200, "2 d 03:10")]
)
def test_durations_are_readable(seconds, text):
    assert duration_text(seconds) == text
