"""Real supervisors over fake trainers: launch them as processes of their own, as an operator would."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tamis.config import Config, build_config, load_config
from tamis.run.files.directory import DirectoryReplaced, RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.heartbeat import Heartbeat, read_heartbeats
from tamis.run.files.lock import RunLocked
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.limits import Grace, Limits, limits_for
from tamis.run.supervise.restarts import RestartBudget
from tamis.run.supervise.supervisor import LaunchOptions, supervise
from tamis.run.supervise.worker_processes import trainer_command

FAKE_TRAINER = Path(__file__).parent / "fake_trainer.py"
QUICKER = 0.04  # the floor of two minutes becomes 4.8 seconds: more than a loaded machine takes from a healthy process
PATIENCE_S = 150.0  # a test that waits longer than this for something has failed
STALLS = ("hang_in_compute", "hang_in_data", "hang_in_save", "loop_with_gil", "stop", "nan")
HURRIED = {
    "PATIENCE": str(QUICKER),
    "TERM_S": "3",
}  # for runs that stall on purpose


def fake_command(config_yaml: Path, processes: int, checkpoint: Path | None) -> list[str]:
    command = [sys.executable, "-u", str(FAKE_TRAINER), "--config", str(config_yaml)]
    return command + (["--resume", str(checkpoint)] if checkpoint else [])


def fake_module_command(config_yaml: Path, processes: int, checkpoint: Path | None) -> list[str]:
    """The fake trainer as a module, which a spare worker can run."""
    real = trainer_command(config_yaml, processes, checkpoint)
    return [word.replace("tamis.train.main", "tests.faults.fake_trainer") for word in real]


def paced_command(config_yaml: Path, processes: int, checkpoint: Path | None) -> list[str]:
    real = trainer_command(config_yaml, processes, checkpoint)
    return [word.replace("tamis.train.main", "tests.faults.paced_trainer") for word in real]


COMMANDS = {"fake": fake_command, "fake_module": fake_module_command, "real": trainer_command, "paced": paced_command}


def tiny_config(out: Path, steps: int = 30, save_every: int = 5) -> Config:
    return build_config(
        {
            "data": {"dataset": "sample", "tokenizer": "byte"},
            "train": {"out_dir": str(out), "steps": steps, "save_every": save_every, "warmup_steps": 0},
        }
    )


def quick_options(config: Config) -> LaunchOptions:
    return LaunchOptions(
        limits=with_patience(limits_for(config), float(os.environ.get("PATIENCE", "1"))),
        budget=RestartBudget(
            restarts=int(os.environ.get("RESTARTS", "10")),
            without_progress=int(os.environ.get("WITHOUT_PROGRESS", "3")),
            first_delay_s=float(os.environ.get("FIRST_DELAY_S", "0.1")),
        ),
        grace=Grace(
            dump_s=20.0,
            halt_s=1.0,
            term_s=float(os.environ.get("TERM_S", "20")),
            orphan_s=float(os.environ.get("ORPHAN_S", "30")),
        ),
        look_every_s=0.1,
        spare_after_s=float(os.environ.get("SPARE_AFTER_S", "inf")),
        command=COMMANDS[os.environ.get("TRAINER", "fake")],
    )


def with_patience(limits: Limits, factor: float) -> Limits:
    """All times multiplied, so that a test of a stall need not wait for minutes."""
    return replace(
        limits,
        floor_s=limits.floor_s * factor,
        first_step_s=limits.first_step_s * factor,
        fetch_s=limits.fetch_s * factor,
        phase_s={name: seconds * factor for name, seconds in limits.phase_s.items()},
    )


def as_operators_do() -> dict[str, str]:
    """The environment without what the suite sets for kernels: no operator trains in Triton's interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


class Launched:
    """A supervisor in a process of its own."""

    def __init__(
        self,
        config: Config,
        *,
        ranks: int = 1,
        fault: dict[str, Any] | None = None,
        stdout: int | None = None,
        detach: bool = False,
        **settings: str,
    ) -> None:
        self.config, self.run = config, RunDirectory(config.train.out_dir).create()
        (self.run.path / "wanted.yaml").write_text(config.to_yaml())
        fault = fault or {}
        patience = HURRIED if fault.get("kind") in STALLS else {}
        environment = {**as_operators_do(), "FAKE_RANKS": str(ranks), "FAKE_FAULT": json.dumps(fault)}
        environment |= {**patience, **settings}
        self.screen = open(self.run.path / "screen", "ab")  # noqa: SIM115
        command = [sys.executable, "-u", "-m", "tests.faults.launched", str(self.run.path / "wanted.yaml"), str(ranks)]
        self.process = subprocess.Popen(
            command + (["detach"] if detach else []),
            env=environment,
            stdout=self.screen if stdout is None else stdout,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )

    def wait(self, seconds: float = PATIENCE_S) -> int:
        return self.process.wait(seconds)

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"what was waited for did not happen:\n{self.told()}")
            time.sleep(0.01)

    def until_step(self, step: int, ranks: int = 1) -> None:
        self.until(lambda: all(self.last_step(rank) >= step for rank in range(ranks)))

    def let_go_on(self) -> None:
        """What FAKE_HOLD stopped goes on; so that a test acts in the middle of a run however slow the machine is."""
        (self.run.path / "go_on").touch()

    def last_step(self, rank: int = 0) -> int:
        return max((beat.step for beat in read_heartbeats(self.run.heartbeat(rank), tail=5)), default=0)

    def beats(self, rank: int = 0) -> list[Heartbeat]:
        return read_heartbeats(self.run.heartbeat(rank))

    def worker_pid(self, rank: int = 0) -> int:
        return self.beats(rank)[-1].pid

    def events(self) -> list[str]:
        return [event["event"] for event in read_events(self.run)]

    def told(self) -> str:
        return (self.run.path / "screen").read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        self.screen.close()


def weights_after(steps: int) -> str:
    """What an unbroken run ends with."""
    weights = hashlib.sha256(b"seed").hexdigest()
    for number in range(1, steps + 1):
        weights = hashlib.sha256(f"{weights} {number}".encode()).hexdigest()
    return weights


def assert_ends_as_unbroken(launched: Launched) -> None:
    steps = launched.config.train.steps
    assert latest_valid_checkpoint(launched.run) == steps
    assert json.loads(launched.run.checkpoint(steps).read_text().split("\n")[0]) == [steps, weights_after(steps)]
    rows = launched.run.training_csv.read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, steps + 1))


def main() -> int:
    config = load_config(sys.argv[1])
    if "detach" in sys.argv:
        from tamis.run.launch import start_detached  # here, because it takes half of this program's imports

        command = [sys.executable, "-u", "-m", "tests.faults.launched", *sys.argv[1:3]]
        return start_detached(command, RunDirectory(config.train.out_dir))
    try:
        return supervise(config, processes=int(sys.argv[2]), options=quick_options(config))
    except RunLocked as error:
        print(error)
        return 2
    except DirectoryReplaced as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
