"""The real trainer in processes that need not import torch each: a server that forks one per request.

Requests are lines of JSON on stdin, {"argv": [...], "log": PATH, "slow": {...}}; the answer is the child's pid, and a
line "PID CODE" when it ends. `slow` makes a part of the trainer stand still for some seconds at a step.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tamis.config import Config, build_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import Heartbeat, HeartbeatFollower
from tamis.run.files.records import write_text_atomic
from tests.faults.launched import as_operators_do

PATIENCE_S = 250.0  # a hang must fail the test, not a machine that is busy


def corpus() -> str:
    """Sixty short documents, written once: opening the embedded sample would take longer than training on it."""
    path = Path(tempfile.gettempdir()) / "tamis_fault_corpus.jsonl"
    dice = random.Random(1)
    words = ["sieve", "flour", "grain", "mesh", "fine", "coarse", "falls", "through", "stays", "behind"]
    texts = [" ".join(dice.choices(words, k=dice.randrange(20, 200))) for _ in range(60)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if not path.exists() or path.read_text() != content:
        write_text_atomic(path, content)
    return str(path)


def tiny_real_config(out: Path, **train: Any) -> Config:
    """One layer: a few milliseconds a step."""
    return build_config(
        {
            "model": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_ff": 64},
            "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 32},
            "data": {
                "dataset": "fineweb_edu_local",
                "local_path": corpus(),
                "tokenizer": "byte",
                "prefetch_batches": 2,
                "val_fraction": 0.1,
                "epochs": None,
            },
            "runtime": {"device": "cpu", "precision": "fp32", "compile": False},
            "train": {
                "steps": 16,
                "seq_len": 64,
                "batch_size": 2,
                "save_every": 4,
                "eval_every": 6,
                "eval_batches": 1,
                "warmup_steps": 2,
                "log_every": 1,
                "samples": 0,
                "tensorboard": False,
                "out_dir": str(out),
                **train,
            },
        }
    )


class RealTrainer:
    """One process of the real trainer."""

    def __init__(self, server: TrainerServer, pid: int, run: RunDirectory) -> None:
        self.server, self.pid, self.run = server, pid, run
        self._follower = HeartbeatFollower(run.heartbeat(0))
        self._beats: list[Heartbeat] = []

    def beats(self) -> list[Heartbeat]:
        self._beats += [beat for beat in self._follower.poll() if beat.pid == self.pid]
        return self._beats

    def until(self, condition: Callable[[list[Heartbeat]], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.beats()) and self.pid not in self.server.ended():
            assert time.monotonic() < deadline, f"waited in vain: {self.output()}"
            time.sleep(0.002)

    def until_phase(self, phase: str, step: int) -> None:
        self.until(lambda beats: any(beat.phase == phase and beat.step >= step for beat in beats))

    def kill(self, number: int) -> None:
        if self.pid not in self.server.ended():
            os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        deadline = time.monotonic() + PATIENCE_S
        while self.pid not in self.server.ended():
            assert time.monotonic() < deadline, f"did not end: {self.output()}"
            time.sleep(0.005)
        return self.server.ended()[self.pid]

    def output(self) -> str:
        path = self.run.path / "output"
        return path.read_text(errors="replace") if path.exists() else "nothing yet"


class TrainerServer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.faults.forking_trainer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=as_operators_do(),
        )
        self._ended: dict[int, int] = {}
        self._unread = b""
        self._answers: list[int] = []

    def start(self, config: Config, *, resume: str | None = "auto", slow: dict[str, Any] | None = None) -> RealTrainer:
        run = RunDirectory(config.train.out_dir).create()
        wanted = run.path / "wanted.yaml"
        wanted.write_text(config.to_yaml())
        argv = ["--config", str(wanted)] + (["--resume", resume] if resume else [])
        request = {"argv": argv, "log": str(run.path / "output"), "slow": slow or {}}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers:
            self._read(0.1)
            assert time.monotonic() < deadline and self.process.poll() is None
        return RealTrainer(self, self._answers.pop(), run)

    def ended(self) -> dict[int, int]:
        self._read(0)
        return self._ended

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _read(self, seconds: float) -> None:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        if not select.select([descriptor], [], [], seconds)[0]:
            return
        *lines, self._unread = (self._unread + os.read(descriptor, 1 << 16)).split(b"\n")
        for line in lines:
            pid, _, code = line.decode().partition(" ")
            if code:
                self._ended[int(pid)] = int(code)
            else:
                self._answers.append(int(pid))


def serve() -> None:
    gc.disable()  # imports make no garbage
    from tamis.train import main as trainer

    gc.freeze()  # so that no collection in a fork visits what is imported
    gc.enable()
    unread = b""
    while True:
        ready = select.select([0], [], [], 0.01)[0]
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                print(fork_trainer(json.loads(line), trainer.main), flush=True)
        reap()


def fork_trainer(request: dict[str, Any], main: Callable[[list[str]], int]) -> int:
    if pid := os.fork():
        return pid
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 1
    try:
        slow_down(**request["slow"])
        code = main(request["argv"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def reap() -> None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    if pid:
        print(pid, os.waitstatus_to_exitcode(status), flush=True)


def slow_down(part: str = "", step: int = 0, seconds: float = 0.0) -> None:
    """Let one part of the trainer stand still once it is reached."""
    from tamis.train import trainer
    from tamis.train.step import TrainStep

    def standing_still(function: Callable[..., Any], at: Callable[[Any], int]) -> Callable[..., Any]:
        def slowed(self: Any, *arguments: Any, **options: Any) -> Any:
            if at(self) == step:
                time.sleep(seconds)
            return function(self, *arguments, **options)

        return slowed

    calls = {"count": 0}

    def counted(_: Any) -> int:
        calls["count"] += 1
        return calls["count"]

    if part == "data":
        open_loader = trainer.open_loader

        def open_slow_loader(*arguments: Any, **options: Any) -> Any:
            loader = open_loader(*arguments, **options)
            type(loader).next = standing_still(type(loader).next, counted)
            return loader

        trainer.open_loader = open_slow_loader
    elif part == "compute":
        TrainStep.__call__ = standing_still(TrainStep.__call__, counted)  # type: ignore[method-assign]
    elif part == "evaluation":
        trainer.Trainer.evaluate = standing_still(  # type: ignore[method-assign]
            trainer.Trainer.evaluate, lambda running: running.telemetry.beat("eval", running.step) or running.step
        )
    elif part == "end":
        trainer.Trainer._end = standing_still(trainer.Trainer._end, lambda running: running.step)  # type: ignore[method-assign]
    elif part == "save":
        save_checkpoint = trainer.save_checkpoint
        trainer.save_checkpoint = lambda *arguments: (time.sleep(seconds), save_checkpoint(*arguments))[1]


if __name__ == "__main__":
    serve()
