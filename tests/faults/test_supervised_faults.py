"""Faults of workers, checkpoints and supervisors, with real processes under a real supervisor."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.lock import ProcessId
from tamis.run.files.manifest import latest_valid_checkpoint
from tests.faults.fake_trainer import SAVE_STAGES
from tests.faults.launched import HURRIED, PATIENCE_S, assert_ends_as_unbroken, tiny_config


def test_a_run_without_faults_ends_with_code_zero_and_is_streamed_to_screen_and_log(launching) -> None:
    launched = launching(steps=10)
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert launched.events() == ["start", "end"]
    for place in (launched.told(), launched.run.train_log.read_text()):
        assert "rank 0 begins after step 0" in place


@pytest.mark.parametrize("fault", ["kill", "crash", "data_failure"])
def test_a_worker_that_dies_mid_step_is_restarted_from_the_newest_checkpoint(launching, fault: str) -> None:
    launched = launching(fault={"kind": fault, "step": 13})
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert launched.events() == ["start", "restart", "start", "end"]
    assert "rank 0 begins after step 10" in launched.told()


def test_data_at_its_end_is_final_and_the_event_gives_the_reason(launching) -> None:
    launched = launching(fault={"kind": "end_of_data", "step": 13})
    assert launched.wait() == 6, launched.told()
    assert launched.events() == ["start", "end"]
    end = read_events(launched.run)[-1]
    assert "the data ended: raise data.epochs; trying again would not help" in end["reason"]


@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_a_kill_at_any_stage_of_a_save_loses_nothing(launching, stage: str) -> None:
    launched = launching(steps=15, fault={"kind": "kill_in_save", "step": 10, "stage": stage})
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    resumed_after = 10 if stage == "after" else 5
    assert f"rank 0 begins after step {resumed_after}" in launched.told()
    assert launched.run.checkpoint_leftovers() == []


def test_after_one_of_two_ranks_is_killed_both_continue_together(launching) -> None:
    launched = launching(ranks=2, fault={"kind": "kill", "rank": 1, "step": 13})
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)


def test_the_whole_group_killed_at_once_is_restarted(launching) -> None:
    launched = launching(ranks=2, FAKE_HOLD="12")
    launched.until_step(12)
    pids = [launched.worker_pid(0), launched.worker_pid(1)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    launched.let_go_on()
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert "restart" in launched.events()


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(launching) -> None:
    launched = launching(steps=30, FAKE_HOLD="17")
    launched.until_step(17)
    newest = launched.run.checkpoint(latest_valid_checkpoint(launched.run) or 0)
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    os.kill(launched.worker_pid(), signal.SIGKILL)
    launched.let_go_on()
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert "damaged" in launched.events() and f"{newest.name} is not used" in launched.told()


def test_a_crash_loop_is_stopped_after_three_restarts_without_progress(launching) -> None:
    launched = launching(fault={"kind": "crash", "step": 13, "always": True})
    assert launched.wait() == 1
    assert launched.events() == ["start", "restart"] * 3 + ["start", "end"]
    assert "3 restarts brought no progress beyond step 12" in launched.told()
    assert "illegal memory access" in launched.run.train_log.read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_on_one_rank_stops_the_run_with_the_anomaly_code(launching, ranks: int) -> None:
    launched = launching(ranks=ranks, fault={"kind": "nan", "rank": ranks - 1, "step": 8})
    assert launched.wait() == 5, launched.told()
    assert "restart" not in launched.events()


def test_a_loss_too_good_to_be_true_halts_with_the_evidence(launching) -> None:
    launched = launching(steps=400, fault={"kind": "leak"})
    assert launched.wait() == 5, launched.told()
    assert launched.run.anomaly.read_text().startswith("loss_too_good\n")
    assert not launched.run.halt.exists()


def test_a_worker_stuck_in_compute_is_dumped_stopped_and_restarted(launching) -> None:
    launched = launching(fault={"kind": "hang_in_compute", "step": 13})
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    events = launched.events()
    assert events[:5] == ["start", "stuck_in_compute", "stackdump", "halt", "term"]
    dump = launched.run.stackdumps()[0]
    assert dump.name.startswith("stackdump_rank0_pid") and "pause_if" in dump.read_text()


def test_a_rank_looping_with_the_gil_held_still_gives_its_stacks_and_is_killed(launching) -> None:
    launched = launching(ranks=2, fault={"kind": "loop_with_gil", "rank": 1, "step": 13})
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert "kill" in launched.events()
    names = [path.name for path in launched.run.stackdumps()]
    assert any("rank0" in name for name in names) and any("rank1" in name for name in names)
    stuck = next(path for path in launched.run.stackdumps() if "rank1" in path.name).read_text()
    assert "pthread_spin_lock" in stuck and "strike_in_compute" in stuck


def test_a_stopped_rank_is_named_and_continued_so_that_it_can_save(launching) -> None:
    launched = launching(ranks=2, fault={"kind": "stop", "rank": 1, "step": 13})
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)
    assert launched.events()[1] == "stopped_rank" and "rank 1 is stopped" in launched.told()


def test_a_rank_starved_of_data_is_distinguished_from_a_stuck_one(launching) -> None:
    launched = launching(ranks=2, fault={"kind": "hang_in_data", "rank": 1, "step": 13})
    assert launched.wait() == 0, launched.told()
    assert "starved_of_data" in launched.events() and "rank 1 waits for the batch of step 13" in launched.told()


def test_a_slow_rank_is_named_and_not_killed(launching) -> None:
    launched = launching(ranks=2, fault={"kind": "slow_data", "rank": 1, "seconds": 0.2}, FAKE_HOLD="23")
    launched.until(lambda: "slow_rank" in launched.events())
    launched.let_go_on()
    assert launched.wait() == 0, launched.told()
    assert "restart" not in launched.events()
    assert "rank 1 waits for data" in launched.told()


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_clock_that_jumps_an_hour_disturbs_nothing(launching, seconds: float) -> None:
    launched = launching(fault={"kind": "clock_jump", "step": 13, "seconds": seconds})
    assert launched.wait() == 0, launched.told()
    assert launched.events() == ["start", "end"]
    first, *_, last = launched.beats()
    assert abs(last.ts - first.ts) > 3000


def test_a_half_written_heartbeat_disturbs_nothing(launching) -> None:
    launched = launching(FAKE_HOLD="7")
    launched.until_step(7)
    with open(launched.run.heartbeat(0), "a") as file:
        file.write('{"ts":17947254')
    launched.let_go_on()
    assert launched.wait() == 0, launched.told()
    assert launched.events() == ["start", "end"]


def test_a_soak_with_step_times_varying_tenfold_raises_no_alarm(launching) -> None:
    """Short, with real processes and a stall limit many times stricter; the hours are in the simulated soak."""
    launched = launching(ranks=2, steps=120, FAKE_STEP_S="0.01", FAKE_VARIATION="1", **HURRIED)
    assert launched.wait() == 0, launched.told()
    assert launched.events() == ["start", "end"]


def test_when_the_supervisor_is_killed_the_workers_stop_and_a_relaunch_adopts_the_run(launching) -> None:
    first = launching(ranks=2, steps=60, FAKE_HOLD="7", FAKE_CHATTER="1000")
    first.until_step(7, ranks=2)
    workers = [ProcessId.of(first.worker_pid(rank)) for rank in (0, 1)]
    first.process.kill()
    first.process.wait()
    first.let_go_on()
    second = launching(ranks=2, steps=60)
    assert second.wait() == 0, second.told()
    assert not any(worker.is_alive() for worker in workers)
    orphans = [beat for beat in second.beats() if beat.pid == workers[0].pid]
    assert orphans[-1].phase == "halted"  # it could still print, save and say so
    assert_ends_as_unbroken(second)
    assert "adopt" in second.events()


def test_a_worker_stuck_after_its_supervisor_died_is_ended_by_the_next_launch(launching) -> None:
    first = launching(steps=20, fault={"kind": "loop_with_gil", "step": 13}, PATIENCE="1")
    first.until_step(13)
    stuck = ProcessId.of(first.worker_pid())
    for process in (*psutil.Process(stuck.pid).children(), first.process):  # without its sidecar the worker stays
        process.kill()
    first.process.wait()
    second = launching(steps=20, ORPHAN_S="1")
    try:
        assert second.wait() == 0, second.told()
        assert not stuck.is_alive()
    finally:
        stuck.send(signal.SIGKILL)
    assert_ends_as_unbroken(second)
    assert second.events()[1:5] == ["adopt", "wait", "kill", "start"] and str(stuck.pid) in second.told()


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_directory_moved_or_removed_under_a_run_ends_it_and_the_new_one_stays_empty(
    launching, tmp_path: Path, how: str
) -> None:
    launched = launching(FAKE_HOLD="7")
    launched.until_step(7)
    worker = ProcessId.of(launched.worker_pid())
    out = launched.run.path
    old = out.rename(tmp_path / "out.old")
    if how == "removed":
        shutil.copy(old / "screen", tmp_path / "screen")
        shutil.rmtree(old)
    out.mkdir()
    assert launched.wait() == 1
    assert not worker.is_alive()
    assert list(out.iterdir()) == []
    if how == "moved":
        assert "out was moved or deleted while this run used it" in (old / "screen").read_text()
        assert latest_valid_checkpoint(RunDirectory(old)) == 5


def test_ranks_that_outlive_a_killed_torchrun_are_gone_before_the_next_start(launching) -> None:
    launched = launching(ranks=2, fault={"kind": "hang_in_compute", "rank": 1, "step": 13}, PATIENCE="1")
    launched.until_step(13, ranks=2)
    ranks = [ProcessId.of(launched.worker_pid(rank)) for rank in (0, 1)]
    os.kill(psutil.Process(ranks[0].pid).ppid(), signal.SIGKILL)
    launched.until(lambda: launched.events().count("start") == 2)
    assert not any(rank.is_alive() for rank in ranks)
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)


FULL_DISK = """
import subprocess, sys, time
from pathlib import Path
disk, screen = Path(sys.argv[1]), Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)], check=True)
from tests.faults.launched import HURRIED, Launched, assert_ends_as_unbroken, tiny_config
outside = screen.open("wb")
slowly = dict(HURRIED, FAKE_STEP_S="0.05")
launched = Launched(tiny_config(disk / "out", steps=240), stdout=outside.fileno(), **slowly)
launched.until_step(7)
filler = disk / "filler"
try:
    with open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
except OSError:
    pass
deadline = time.monotonic() + 60
while "disk_full" not in screen.read_text():
    assert time.monotonic() < deadline
    time.sleep(0.1)
filler.unlink()
assert launched.wait() == 0
assert_ends_as_unbroken(launched)
assert "restart" not in launched.events(), launched.events()
"""


def test_a_full_disk_is_reported_and_ends_neither_trainer_nor_supervisor(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    script = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK]
    result = subprocess.run(
        [*script, str(tmp_path / "disk"), str(tmp_path / "screen")],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr + (tmp_path / "screen").read_text()


def test_two_launches_never_share_a_directory(launching) -> None:
    first = launching(FAKE_HOLD="3")
    first.until_step(3)
    second = launching()
    assert second.wait() == 2
    first.let_go_on()
    assert "belongs to a running launch" in second.told() and str(first.process.pid) in second.told()
    assert first.wait() == 0, first.told()
    assert_ends_as_unbroken(first)


def test_a_terminal_that_goes_away_does_not_end_the_run(launching) -> None:
    launched = launching(FAKE_HOLD="5")
    launched.until_step(5)
    launched.process.send_signal(signal.SIGHUP)
    os.kill(launched.worker_pid(), signal.SIGHUP)
    launched.let_go_on()
    assert launched.wait() == 0, launched.told()
    assert_ends_as_unbroken(launched)


def test_a_finished_run_is_not_run_again(launching) -> None:
    assert launching(steps=5).wait() == 0
    again = launching(steps=5)
    assert again.wait() == 0
    assert "nothing left to do" in again.told()


def test_the_watchdog_alone_halts_a_run_that_really_stalls(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "out", steps=100)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    trainer = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "fake_trainer.py"), "--config", str(tmp_path / "config.yaml")],
        env={**os.environ, "FAKE_HOLD": "13"},
    )
    while not (tmp_path / "out" / "heartbeat_rank0.jsonl").exists():
        time.sleep(0.05)
    script = Path(__file__).parents[2] / "scripts" / "_watchdog.py"
    command = [sys.executable, str(script), "--dir", str(tmp_path / "out"), "--halt", "1", "--stall-floor", "4"]
    watchdog = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (tmp_path / "out" / ".HALT").exists() and watchdog.poll() is None:
        time.sleep(0.05)
    (tmp_path / "out" / "go_on").touch()  # what hung can still obey the halt
    told, _ = watchdog.communicate(timeout=PATIENCE_S)
    assert watchdog.returncode == 5, told
    assert trainer.wait(PATIENCE_S) == 3
    assert (tmp_path / "out" / ".anomaly_type").read_text().startswith("stuck_in_compute\n")
    assert list((tmp_path / "out").glob("stackdump_rank0_*.txt"))
