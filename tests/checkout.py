"""A scratch checkout for tests that do what an operator does: the tree, this environment as its .venv, and a shell."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tests.faults.forking_trainer import corpus

ROOT = Path(__file__).parents[1]
STAMPED = ("pyproject.toml", "constraints.txt", "scripts/prime_bootstrap.sh")  # as prime_bootstrap.sh sums them
TIMEOUT_S = 400

# A model and steps that a processor does in milliseconds; every key is one an operator can write on a command line too.
MINIATURE = [
    "model.dim=32",
    "model.n_layers=1",
    "model.n_heads=4",
    "model.n_kv_groups=2",
    "model.d_k=8",
    "model.d_ff=48",
    "nsa.l=8",
    "nsa.d=4",
    "nsa.l_sel=8",
    "nsa.n_sel=4",
    "nsa.w=16",
    "train.seq_len=32",
    "train.batch_size=2",
    "train.warmup_steps=2",
    "train.eval_batches=1",
    "data.tokenizer=byte",
    "data.lanes=4",
    "data.val_fraction=0.05",
    "runtime.device=cpu",
]

# Where the texts come from: the hub's loader takes two seconds more to start than a local file.
HUB = ["data.hub_name=tamis/data/assets/sample"]
LOCAL = ["data.dataset=local", "data.local_path=texts.jsonl"]

# An operator's machine runs one training; this one may run many. So the two look at this checkout's processes alone.
OWN_PROCESSES = """
import os, re, signal, sys
import psutil

pattern = next(word for word in reversed(sys.argv[2:]) if not word.startswith("-") or " " in word)
found = []
for process in psutil.process_iter():
    try:
        if process.cwd() == {here!r} and re.search(pattern, " ".join(process.cmdline())) and process.pid != os.getpid():
            found.append(process)
    except psutil.Error:
        pass
for process in [p for p in found if p.cmdline()[:1] != ["bash"]]:
    print(process.pid) if sys.argv[1] == "pgrep" else process.send_signal(signal.SIGTERM)
sys.exit(0 if found else 1)
"""


class Done(str):
    """What a command printed, stdout and stderr as an operator sees them, and its exit code."""

    code: int


@dataclass
class Checkout:
    path: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        dropped = ("NSA_", "NCCL_", "TRITON_", "PYTEST_", "CONFIG")
        ours = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        path = f"{self.path / 'shims'}:{self.path / '.venv' / 'bin'}:{ours['PATH']}"
        return {**ours, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160", **more}

    def run(self, command: str, **environment: str) -> Done:
        """As typed into bash in the repository's root."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.path,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        result = Done(done.stdout)
        result.code = done.returncode
        return result

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """In a pane of its own; what it prints is kept in the file `pane` of the checkout."""
        with open(self.path / "pane", "w") as pane:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.path,
                env=self.environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=pane,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.running.append(process)
        return process

    @property
    def pane(self) -> str:
        return (self.path / "pane").read_text()

    def until(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert process.poll() is None, f"ended with {process.returncode}:\n{self.pane}"
            assert time.monotonic() < deadline, self.pane
            time.sleep(0.05)

    def step_of(self, out: str) -> int:
        beats = read_heartbeats(RunDirectory(self.path / out).heartbeat(0), tail=1)
        return beats[-1].step if beats else 0

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def make_checkout(path: Path) -> Checkout:
    path.mkdir(parents=True, exist_ok=True)
    for name in ("configs", "scripts", "docs"):
        shutil.copytree(ROOT / name, path / name)
    for name in ("pyproject.toml", "constraints.txt", "README.md"):
        shutil.copy(ROOT / name, path / name)
    (path / "tamis").symlink_to(ROOT / "tamis")
    (path / "texts.jsonl").symlink_to(corpus())
    _lend_environment(path / ".venv")
    stamp(path)
    (path / "shims").mkdir()
    program = path / "shims" / "own_processes"  # without .py, so that the linter leaves it alone
    program.write_text(OWN_PROCESSES.format(here=str(path)))
    commands = {name: f'"{sys.executable}" "{program}" {name}' for name in ("pgrep", "pkill")}
    commands["torchrun"] = f'"{path}/.venv/bin/python" "{path}/scripts/_torchrun.py"'  # as the bootstrap installs it
    for name, command in commands.items():
        shim = path / "shims" / name
        shim.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        shim.chmod(0o755)
    return Checkout(path)


def stamp(path: Path) -> None:
    """Tell the bootstrap that .venv holds what these files ask for."""
    summed = hashlib.sha256(b"".join((path / name).read_bytes() for name in STAMPED)).hexdigest()[:16]
    (path / ".venv" / ".tamis-stamp").write_text(f"{summed} [test]\n")


def _lend_environment(venv: Path) -> None:
    """This interpreter's environment under another name, so that the bootstrap finds it complete."""
    venv.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".tamis-stamp":
            (venv / entry.name).symlink_to(entry)
