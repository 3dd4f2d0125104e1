"""The real trainer killed, told to stop and stalled: it ends as if nothing had happened, or exactly as promised."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tamis.config import Config, load_config
from tamis.run.copies.copier import Copier
from tamis.run.copies.fetch import fetch_newest
from tamis.run.copies.folder_store import FolderStore
from tamis.run.copies.store import Transfer
from tamis.run.files.directory import RunDirectory
from tamis.run.files.lock import RunLock
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.files.records import VAL_HEADER, CsvLog
from tamis.run.limits import Grace, Limits
from tamis.run.supervise.spare import PRELOAD
from tamis.run.supervise.supervisor import is_complete
from tamis.run.supervise.watchdog import watch_run
from tests.faults.forking_trainer import RealTrainer, TrainerServer, tiny_real_config
from tests.faults.launched import as_operators_do, with_patience

SEEDS = range(30)
pytestmark = pytest.mark.timeout(900)  # up to ten runs in one test
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[TrainerServer]:
    server = TrainerServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def unbroken(server: TrainerServer, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    config = tiny_real_config(tmp_path_factory.mktemp("unbroken"))
    trainer = server.start(config, resume=None)
    assert trainer.wait() == 0, trainer.output()
    return trainer.run


@pytest.fixture(scope="module", autouse=True)
def spare_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The process of a spare worker, in a folder. It starts before all tests: its imports give way to everything."""
    folder = tmp_path_factory.mktemp("spare")
    (folder / "wanted.yaml").write_text(tiny_real_config(folder / "out").to_yaml())
    (folder / "line").write_text(json.dumps(["--config", str(folder / "wanted.yaml")]) + "\n")
    command = [sys.executable, "-u", "-m", PRELOAD, "tamis.train.main"]
    with open(folder / "line") as line, open(folder / "log", "w") as log, open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=as_operators_do(), stdin=line, stdout=log, stderr=errors)
    yield process, folder
    process.kill()
    process.wait()


def assert_same_end(run: RunDirectory, unbroken: RunDirectory) -> None:
    """Weights, optimizer, schedule, random state and data position bit by bit, and every number that was logged."""
    last = latest_valid_checkpoint(unbroken)
    assert last is not None and latest_valid_checkpoint(run) == last
    ours, theirs = (torch.load(each.checkpoint(last), weights_only=True) for each in (run, unbroken))
    for state in (ours, theirs):
        del state["config"]["train"]["out_dir"]
    assert_identical(ours, theirs)
    assert run.val_csv.read_text() == unbroken.val_csv.read_text()
    assert without_speed(run.training_csv) == without_speed(unbroken.training_csv)


def assert_identical(ours: Any, theirs: Any, where: str = "state") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_identical(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_identical(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where


def without_speed(path: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in path.read_text().splitlines()]


def finish(server: TrainerServer, config: Config) -> RealTrainer:
    trainer = server.start(config)
    assert trainer.wait() == 0, trainer.output()
    return trainer


@pytest.mark.parametrize("seeds", [SEEDS[first::6] for first in range(6)], ids=str)
def test_runs_killed_at_random_steps_end_with_identical_weights(server, unbroken, tmp_path, seeds: range) -> None:
    kills = 0
    for seed in seeds:
        dice = random.Random(seed)
        config = tiny_real_config(tmp_path / str(seed))
        for _ in range(dice.choice([1, 1, 2])):
            trainer = server.start(config)
            trainer.until_phase(
                dice.choice(["step_start", "progress", "step_end", "checkpoint"]), dice.randrange(1, 16)
            )
            time.sleep(dice.uniform(0, 0.01))
            trainer.kill(signal.SIGKILL)
            kills += trainer.wait() == -signal.SIGKILL
            if is_complete(trainer.run, config):  # on a busy machine a run may be done before its kill
                break
        else:
            finish(server, config)
        assert_same_end(trainer.run, unbroken)
    assert kills >= 3


@pytest.mark.parametrize("step", [12, 16])
def test_an_evaluation_that_a_kill_prevented_is_done_on_resume(server, unbroken, tmp_path, step: int) -> None:
    """Step 12 is saved, then evaluated; step 16 is the last."""
    config = tiny_real_config(tmp_path)
    trainer = server.start(config, slow={"part": "evaluation", "step": step, "seconds": 600})
    trainer.until_phase("eval", step)
    trainer.kill(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    assert latest_valid_checkpoint(tmp_path) == step
    assert_same_end(finish(server, config).run, unbroken)


def test_a_run_killed_after_its_last_evaluation_writes_its_end_on_resume(server, unbroken, tmp_path) -> None:
    config = tiny_real_config(tmp_path)
    trainer = server.start(config, slow={"part": "end", "step": 16, "seconds": 600})
    trainer.until(lambda beats: 16 in CsvLog(trainer.run.val_csv, VAL_HEADER).steps())
    trainer.kill(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    assert not trainer.run.metrics_json.exists() and not is_complete(trainer.run, config)
    assert_same_end(finish(server, config).run, unbroken)
    ours, theirs = (json.loads(run.metrics_json.read_text()) for run in (trainer.run, unbroken))
    assert ours.keys() == theirs.keys() and is_complete(trainer.run, config)
    for key in ("exit_code", "steps_done", "tokens_seen", "loss", "val_loss"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6), key


def test_figures_of_an_earlier_end_do_not_outlive_the_next_start(server, tmp_path) -> None:
    config = tiny_real_config(tmp_path, steps=2000)
    trainer = server.start(config)
    trainer.until_phase("step_end", 3)
    trainer.run.halt.touch()
    assert trainer.wait() == 3, trainer.output()
    assert json.loads(trainer.run.metrics_json.read_text())["exit_code"] == 3
    trainer = server.start(config)
    trainer.until_phase("step_end", 6)
    trainer.kill(signal.SIGKILL)
    trainer.wait()
    assert not trainer.run.metrics_json.exists()


def test_a_run_continued_from_its_copy_on_a_fresh_machine_ends_with_identical_weights(
    server, unbroken, tmp_path
) -> None:
    config = tiny_real_config(tmp_path / "lost")
    trainer = server.start(config, slow={"part": "compute", "step": 10, "seconds": 600})
    trainer.until_phase("step_start", 10)
    trainer.kill(signal.SIGKILL)
    trainer.wait()
    copier = Copier(trainer.run, FolderStore(tmp_path / "there"), 1, Transfer())
    copier.claim()
    copier.copy_step(copier.pending()[0])
    shutil.rmtree(tmp_path / "lost")
    path, _ = fetch_newest(f"file://{tmp_path}/there", None, [f"train.out_dir={tmp_path}/fresh"])
    assert_same_end(finish(server, load_config(path, [f"train.out_dir={tmp_path}/fresh"])).run, unbroken)


@pytest.fixture(scope="module")
def told_to_stop(server, tmp_path_factory) -> dict[str, tuple[RealTrainer, int]]:
    """Trainers that get TERM while one part of them stands still, all at once, each with the code it ended with."""
    parts = {
        "step": ({}, "progress"),
        "first step, as a compiler does": ({"part": "compute", "step": 1, "seconds": 600}, "progress"),
        "wait for data": ({"part": "data", "step": 6, "seconds": 600}, "step_start"),
        "evaluation": ({"part": "evaluation", "step": 6, "seconds": 5}, "eval"),
        "save": ({"part": "save", "seconds": 5}, "checkpoint"),
    }
    trainers = {}
    for name, (slow, phase) in parts.items():
        config = tiny_real_config(tmp_path_factory.mktemp("term"), steps=16 if slow else 2000, save_every=4)
        trainers[name] = server.start(config, resume=None, slow=slow)
        trainers[name].until_phase(phase, 1 if "first" in name else 6 if slow else 20)
        trainers[name].kill(signal.SIGTERM)
    return {name: (trainer, trainer.wait()) for name, trainer in trainers.items()}


@pytest.mark.parametrize("part", ["step", "first step, as a compiler does", "wait for data", "evaluation", "save"])
def test_term_ends_a_trainer_within_its_deadline_in_every_phase(told_to_stop, server, unbroken, part: str) -> None:
    trainer, code = told_to_stop[part]
    assert code == 4, trainer.output()
    assert "SIGTERM received" in trainer.output()
    last = trainer.beats()[-1]
    if part in ("first step, as a compiler does", "wait for data"):
        assert "no step boundary in time" in trainer.output()
    else:
        assert last.phase == "halted" and latest_valid_checkpoint(trainer.run) == last.step
    if part != "step":
        config = tiny_real_config(trainer.run.path)
        assert_same_end(finish(server, config).run, unbroken)


def test_the_watchdog_stops_a_trainer_that_really_stalls_and_it_resumes_exactly(server, unbroken, tmp_path) -> None:
    config = tiny_real_config(tmp_path)
    trainer = server.start(config, slow={"part": "compute", "step": 7, "seconds": 600})
    trainer.until_phase("progress", 7)
    quick = with_patience(Limits(), 0.01)
    code = watch_run(
        tmp_path, limits=quick, grace=Grace(halt_s=0.5, term_s=1.0), look_every_s=0.1, say=lambda line: None
    )
    assert code == 5
    assert trainer.wait() == -signal.SIGKILL
    assert trainer.run.anomaly.read_text().startswith("stuck_in_compute\n")
    assert "slowed" in trainer.run.stackdumps()[0].read_text()
    assert_same_end(finish(server, config).run, unbroken)


def test_usr1_during_startup_does_not_end_the_trainer(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(tiny_real_config(tmp_path / "out", steps=2, eval_every=0).to_yaml())
    command = [sys.executable, "-u", str(ROOT / "scripts" / "train_showcase.py"), "--config", "config.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=as_operators_do(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        rest = process.stdout.read()
    assert "loading torch" in first
    assert process.returncode == 0, rest


@pytest.mark.parametrize("held", ["trainer_lock", "lock", "launch_lock"])
def test_a_trainer_never_shares_a_directory_with_another_or_with_a_launch(server, tmp_path, held: str) -> None:
    """Between two attempts of a launch no trainer runs; one that slipped in there would end the launch."""
    config = tiny_real_config(tmp_path)
    with RunLock(getattr(RunDirectory(tmp_path), held)) as lock:
        lock.acquire("owner")
        second = server.start(config)
        assert second.wait() == 2
    assert f"running owner (pid {os.getpid()}" in second.output()


def test_a_tensorboard_folder_that_cannot_be_written_does_not_end_the_run(server, tmp_path) -> None:
    (tmp_path / "tb").write_text("in the way")
    trainer = server.start(tiny_real_config(tmp_path, tensorboard=True, steps=6))
    assert trainer.wait() == 0, trainer.output()
    assert "TensorBoard" in trainer.output()


def test_a_halt_file_stops_an_unsupervised_trainer_and_a_stale_one_does_not(server, tmp_path) -> None:
    halt = RunDirectory(tmp_path).halt
    halt.touch()
    os.utime(halt, (time.time() - 3600,) * 2)
    trainer = server.start(tiny_real_config(tmp_path, steps=2000))
    trainer.until_phase("step_end", 3)
    assert "stale .HALT" in trainer.output() and not halt.exists()
    halt.touch()
    assert trainer.wait() == 3, trainer.output()
    assert not halt.exists()
    assert latest_valid_checkpoint(tmp_path) == trainer.beats()[-1].step


FULL_DISK = """
import json, subprocess, sys
from pathlib import Path
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=960k", "none", str(disk)], check=True)
config = (disk.parent / "config.yaml")
train = [sys.executable, "-m", "tamis.train.main", "--config", str(config)]
first = subprocess.run([*train, "train.keep_checkpoints=0"], capture_output=True, text=True)  # room for two
from tamis.run.files.manifest import latest_valid_checkpoint
newest = latest_valid_checkpoint(disk / "out")
for old in (disk / "out").glob("checkpoint_step4.*"):
    old.unlink()  # what the message asks for
again = subprocess.run([*train, "--resume", "auto"], capture_output=True, text=True)
print(json.dumps([first.returncode, first.stdout + first.stderr, newest, again.returncode, again.stdout + again.stderr,
                  latest_valid_checkpoint(disk / "out"), (disk / "out" / "training.csv").read_text()]))
"""


def test_a_full_disk_costs_the_new_checkpoint_only_and_the_run_continues(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "config.yaml").write_text(tiny_real_config(disk / "out", steps=12, eval_every=0).to_yaml())
    script = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, str(disk)]
    result = subprocess.run(
        script, capture_output=True, text=True, timeout=600, env=as_operators_do(), cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    code, output, newest, again, more_output, last, rows = json.loads(result.stdout.splitlines()[-1])
    assert "NO checkpoint" in output and "No space left" in output
    assert "step 12/12" in output  # it trained on to the end,
    assert (code, newest) == (1, 8), output  # which does not count as done; what was saved before stands
    assert (again, last) == (0, 12), more_output
    assert [row.split(",")[0] for row in rows.splitlines()[1:]] == [str(step) for step in range(1, 13)]


def test_the_process_of_a_spare_worker_trains_to_identical_weights(spare_worker, unbroken) -> None:
    process, folder = spare_worker
    with contextlib.suppress(psutil.NoSuchProcess, OSError):  # root may hurry a process on a busy machine
        for thread in psutil.Process(process.pid).threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, 0)
    code, errors = process.wait(), (folder / "errors").read_text()
    assert code == 0 and errors == "", errors
    assert_same_end(RunDirectory(folder / "out"), unbroken)
