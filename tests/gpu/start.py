"""Where the start of a training run goes, on a GPU: `python -m tests.gpu.start [section.key=value …]`.

Trains two steps of M7C twice, each in a process of its own: with empty caches of compiled kernels, then with those
that the first left. Python's bytecode is there both times, as pip leaves it; where an installation has none, imports
alone take twice as long. Prints when each line of the worker came, and the end of step 1; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = "configs/m7c_125m_80g.yaml"
KEYS = ("data.dataset=synthetic", "train.steps=2", "train.log_every=1", "train.eval_every=0")
SHOWN_S = 0.05  # lines that follow sooner say nothing about time
PATIENCE_S = 240


def write_bytecode(folder: Path) -> dict[str, str]:
    """Write the bytecode of everything a worker imports; returns the environment that finds it."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    modules = "tamis.train.main, tamis.train.trainer, torch._dynamo, torch._inductor.compile_fx"
    subprocess.run([sys.executable, "-c", f"import {modules}"], env=environment, check=True)
    return environment


def start(folder: Path, name: str, overrides: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of the process to each of its lines."""
    environment = environment | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment.pop(variable, None)
    keys = [*KEYS, f"train.out_dir={folder / name}", *overrides]
    began = time.monotonic()
    command = [sys.executable, "-m", "tamis.train.main", "--config", CONFIG, *keys]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert worker.stdout is not None
    times, before = {}, 0.0
    for line in worker.stdout:
        now = time.monotonic() - began
        times[line.strip()] = round(now, 2)
        if now - before > SHOWN_S:
            print(f"{name:5} {now:7.2f} {now - before:+7.2f}  {line.strip()[:110]}", flush=True)
        before = now
    if worker.wait(PATIENCE_S):
        raise RuntimeError(f"the worker ended with exit code {worker.returncode}")
    return times


def end_of_step_1(times: dict[str, float]) -> float:
    return next(seconds for line, seconds in times.items() if line.startswith("step 1/"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = write_bytecode(Path(folder))
        found = {name: start(Path(folder), name, sys.argv[1:], environment) for name in ("cold", "warm")}
    ends = {name: end_of_step_1(times) for name, times in found.items()}
    print(f"step 1 ends after {ends['cold']} s with nothing compiled, after {ends['warm']} s with everything compiled")
    print(json.dumps({"end_of_step_1_s": ends, "lines": found}))


if __name__ == "__main__":
    main()
