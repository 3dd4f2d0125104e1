"""A trainer without a model: real heartbeats, checkpoints, signals and exit codes, a chain of hashes for weights.

`python fake_trainer.py --config OUT/config.yaml [--resume CHECKPOINT]`; faults come as JSON in FAKE_FAULT:
{"kind": ..., "rank": 0, "step": 5, "always": false}. With FAKE_RANKS=2 it starts that many of itself, as torchrun does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import yaml

from tamis.run.files import manifest as checkpoints
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.heartbeat import HeartbeatWriter
from tamis.run.files.lock import RunLock
from tamis.run.files.records import TRAINING_HEADER, VAL_HEADER, CsvLog, write_atomic, write_json_atomic
from tamis.run.worker.signals import EXIT_CODE_OF, StopSignals

SAVE_STAGES = ("before", "half written", "before rename", "before manifest", "after")


class Fault:
    """Strikes once per run directory, unless it is to strike always."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        fault = json.loads(os.environ.get("FAKE_FAULT", "{}"))
        self.kind: str = fault.get("kind", "")
        self.step: int = fault.get("step", -1)
        self.stage: str = fault.get("stage", "")
        self.seconds: float = fault.get("seconds", 3600.0)
        self.is_mine = bool(fault) and fault.get("rank", 0) == rank
        self.always: bool = fault.get("always", False)
        self._struck = run.path / f"fault_struck_rank{rank}"

    def strikes(self, kind: str, step: int, stage: str = "") -> bool:
        if not self.is_mine or (self.kind, self.step, self.stage) != (kind, step, stage):
            return False
        if self._struck.exists() and not self.always:
            return False
        self._struck.touch()
        return True


class FakeTrainer:
    def __init__(self, train: SimpleNamespace, rank: int, ranks: int) -> None:
        self.train, self.rank, self.ranks = train, rank, ranks
        self.run = RunDirectory(train.out_dir).create()
        self.signals = StopSignals(self.run, rank)
        self.heartbeat = HeartbeatWriter(self.run.heartbeat(rank), rank)
        self.heartbeat.beat("boot", 0)
        self.lock = RunLock(self.run.trainer_lock)
        if rank == 0:
            self.lock.acquire("trainer")
        self.fault = Fault(self.run, rank)
        self.csv = CsvLog(self.run.training_csv, TRAINING_HEADER)
        self.val_csv = CsvLog(self.run.val_csv, VAL_HEADER)
        self.weights, self.step = hashlib.sha256(b"seed").hexdigest(), 0
        self.chatter = int(os.environ.get("FAKE_CHATTER", "0"))  # bytes printed per step
        self.variation = random.Random(1) if "FAKE_VARIATION" in os.environ else None  # step times vary tenfold
        self.step_s = float(os.environ.get("FAKE_STEP_S", "0.02"))
        self.hold_at = int(os.environ.get("FAKE_HOLD", "0"))  # stands inside this step until OUT/go_on is there

    def main(self, resume: str | None) -> int:
        if resume:
            checkpoints.require_valid(resume)
            self.step, self.weights = json.loads(Path(resume).read_text().split("\n", 1)[0])
        if self.rank == 0:
            self.run.metrics_json.unlink(missing_ok=True)
            checkpoints.remove_leftovers(self.run)
            self.csv.resume_at(self.step)
            self.val_csv.resume_at(self.step)
        self.pause_if("hang_at_boot", 0)
        self.heartbeat.beat("loader_ready", self.step)
        print(f"rank {self.rank} begins after step {self.step}", flush=True)
        while self.step < self.train.steps:
            self.train_once(self.step + 1)
            if (self.fault.kind, self.fault.step) == ("hang_in_eval", self.step):
                self.heartbeat.beat("eval", self.step)
                self.pause_if("hang_in_eval", self.step)
            if self.step % self.train.save_every == 0:
                self.save()
            if (reason := self.agreed_stop()) is not None:
                self.save()
                if reason == "halt" and self.rank == 0:
                    HaltFile(self.run.halt).consume()
                self.heartbeat.beat("halted", self.step, exit_code=int(EXIT_CODE_OF[reason]))
                return EXIT_CODE_OF[reason]
        self.save()
        if self.rank == 0:
            self.val_csv.append(self.step, 3.0, 20.0)
        self.heartbeat.beat("done", self.step, exit_code=0)
        if self.rank == 0:
            write_json_atomic(self.run.metrics_json, {"exit_code": 0, "steps_done": self.step})
        return ExitCode.DONE

    def train_once(self, number: int) -> None:
        self.heartbeat.beat("step_start", number)
        self.pause_if("hang_in_data", number)
        fetch_s = self.fault.seconds if self.fault.is_mine and self.fault.kind == "slow_data" else 0.0
        time.sleep(fetch_s)
        self.heartbeat.beat("progress", number, dt_fetch_s=fetch_s)
        self.jump_clock(number)
        self.strike_in_compute(number)
        while number == self.hold_at and not (self.run.path / "go_on").exists():
            time.sleep(0.01)
        time.sleep(self.step_s * self.variation.uniform(1, 10) if self.variation else self.step_s)
        self.wait_for_the_others(number)
        self.weights = hashlib.sha256(f"{self.weights} {number}".encode()).hexdigest()
        self.step = number
        self.heartbeat.beat("step_end", number, loss=self.loss(number), grad_norm=1.0, dt_fetch_s=fetch_s)
        if self.chatter:
            print("x" * self.chatter, flush=True)
        if self.rank == 0:
            self.csv.append(number, 3.0, 1e-4, 1000.0)

    def loss(self, number: int) -> float:
        if self.fault.strikes("nan", number):
            self.heartbeat.beat("failed", number, loss=math.nan, exit_code=int(ExitCode.ANOMALY), detail="loss is nan")
            sys.exit(ExitCode.ANOMALY)
        return 0.01 if self.fault.is_mine and self.fault.kind == "leak" else 3.0

    def strike_in_compute(self, number: int) -> None:
        if self.fault.strikes("kill", number):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.strikes("crash", number):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.fault.strikes("data_failure", number):
            self.heartbeat.beat("failed", number, exit_code=int(ExitCode.DATA_FAILURE))
            sys.exit(ExitCode.DATA_FAILURE)
        if self.fault.strikes("end_of_data", number):
            detail = "the data ended: raise data.epochs"
            self.heartbeat.beat("failed", number, exit_code=int(ExitCode.DATA_FAILURE), lasting=True, detail=detail)
            sys.exit(ExitCode.DATA_FAILURE)
        if self.fault.strikes("stop", number):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault.strikes("loop_with_gil", number):
            os.nice(19)  # the loop takes no time from other tests
            spin = ctypes.c_int(1)
            ctypes.PyDLL(None).pthread_spin_unlock(ctypes.byref(spin))
            for _ in range(2):  # the second never returns; a PyDLL call keeps the GIL, and no signal ends it
                ctypes.PyDLL(None).pthread_spin_lock(ctypes.byref(spin))
        self.pause_if("hang_in_compute", number)

    def jump_clock(self, number: int) -> None:
        if self.fault.strikes("clock_jump", number):
            real = time.time
            time.time = lambda: real() + self.fault.seconds

    def pause_if(self, kind: str, number: int) -> None:
        if self.fault.strikes(kind, number):
            time.sleep(self.fault.seconds)

    def wait_for_the_others(self, number: int) -> None:
        """The collective: no rank ends a step before all have computed it."""
        if self.ranks == 1:
            return
        (self.run.path / f"reached_rank{self.rank}").write_text(str(number))
        for other in range(self.ranks):
            while _number_in(self.run.path / f"reached_rank{other}") < number:
                time.sleep(0.002)

    def agreed_stop(self):
        """Rank 0 decides for all, at a step all have reached."""
        if self.ranks == 1:
            return self.signals.stop_requested
        word = self.run.path / f"stop_after_{self.step}"
        if self.rank == 0:
            reason = self.signals.stop_requested
            word.write_text(reason or "no")
        while not (said := _text_in(word)):
            time.sleep(0.002)
        self.wait_for_the_others(self.step)
        return None if said == "no" else said

    def save(self) -> None:
        if self.rank != 0 or self.step in self.run.checkpoints():
            return
        self.heartbeat.beat("checkpoint", self.step)
        self.die_if_at("before")
        try:
            write_atomic(self.run.checkpoint(self.step), self._write)
        except OSError as error:
            print(f"NO checkpoint: {error}", flush=True)
            return
        self.die_if_at("before manifest")
        checkpoints.write_manifest(self.run, self.step, config_hash="fake")
        self.die_if_at("after")
        checkpoints.retire(self.run, self.train.keep_checkpoints)

    def _write(self, file) -> None:
        file.write(json.dumps([self.step, self.weights]).encode() + b"\n")
        file.flush()
        self.die_if_at("half written")
        self.pause_if("hang_in_save", self.step)
        file.write(b"padding" * 1000)
        self.die_if_at("before rename")

    def die_if_at(self, stage: str) -> None:
        if self.fault.strikes("kill_in_save", self.step, stage):
            os.kill(os.getpid(), signal.SIGKILL)


def _text_in(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _number_in(path: Path) -> int:
    return int(_text_in(path) or 0)


def start_ranks(ranks: int) -> int:
    """As torchrun: the first failure ends all, and the answer is 1 whatever the code was."""
    children = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank), "FAKE_RANKS": str(ranks)})
        for rank in range(ranks)
    ]

    def hand_on(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, hand_on)
    while any(child.poll() is None for child in children):
        time.sleep(0.02)
        if any(child.poll() for child in children):
            time.sleep(0.5)  # the others may be ending by themselves
            hand_on(signal.SIGTERM, None)
            for child in children:
                child.wait()
    return int(any(child.returncode for child in children))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--resume")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("FAKE_RANKS", "1"))
    if ranks > 1 and "RANK" not in os.environ:
        return start_ranks(ranks)
    # Not by load_config: its schema takes longer to load than most of these runs last.
    tree = yaml.safe_load(Path(arguments.config).read_text())
    trainer = FakeTrainer(SimpleNamespace(**tree["train"]), int(os.environ.get("RANK", "0")), ranks)
    return trainer.main(arguments.resume)


if __name__ == "__main__":
    sys.exit(main())
