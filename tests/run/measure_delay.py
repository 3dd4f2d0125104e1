"""Measure what everything around a trainer adds to its steps: `python -m tests.run.measure_delay --minutes 10`.

One `tamis launch` of the real trainer, with messages to a local HTTP receiver, copies of every checkpoint, cost keys,
OUT/live.html, a spare worker, and `tamis monitor --web` with a reader. All of it, the supervisor included, is stopped
and continued in turn while the trainer goes on, so that steps with and without it come from one process. What could not
be done meanwhile is done afterwards: the delay is overstated. Runs by hand. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tamis.config import Config, build_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tests.faults.forking_trainer import tiny_real_config
from tests.faults.launched import as_operators_do
from tests.run.notify.receiver import Receiver

BLOCK_S = 1.0
PATIENCE_S = 300.0
LOADING_S = 60.0  # the spare worker starts and imports once
DIGEST_HOURS = 20 / 3600  # a message every 20 s is more than any operator asks for
LARGER = {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_ff": 256}
RESAMPLES = 10_000
Block = tuple[float, float]  # Unix time of its begin and end


def config_for(out: Path) -> Config:
    sections = tiny_real_config(out, steps=10**6, seq_len=128, save_every=100, eval_every=0).model_dump()
    return build_config(sections | {"model": sections["model"] | LARGER})


@contextlib.contextmanager
def launched(out: Path) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Train with everything; yields a function that lists the processes around the trainer."""
    out.with_suffix(".yaml").write_text(config_for(out).to_yaml())
    receiver, copies, seen = Receiver(), out.with_suffix(".copies"), threading.Event()
    environment = {**as_operators_do(), "OMP_NUM_THREADS": "1", "TAMIS_NOTIFY": f"http://{receiver.place}/"}
    keys = [f"copy.to=file://{copies}", "cost.per_hour=2.5", "cost.max=1000", f"notify.digest_hours={DIGEST_HOURS}"]
    program = [sys.executable, "-u", "-m", "tamis"]
    with open(out.with_suffix(".log"), "wb") as log:
        command = [*program, "launch", str(out.with_suffix(".yaml")), *keys]
        launch = subprocess.Popen(command, env=environment, cwd=out.parent, stdout=log, stderr=log)
    run = RunDirectory(out)
    _until(lambda: any(beat.step > 50 for beat in read_heartbeats(run.heartbeat(0), tail=3)), out)
    page = subprocess.Popen([*program, "monitor", str(out), "--web", "--port", "0"], stdout=subprocess.PIPE)
    worker = psutil.Process(read_heartbeats(run.heartbeat(0), tail=1)[-1].pid)

    def around() -> list[psutil.Process]:
        trainer = {worker.pid, *(child.pid for child in worker.children(recursive=True))}
        supervisor = psutil.Process(launch.pid)
        processes = [supervisor, *supervisor.children(recursive=True), psutil.Process(page.pid)]
        return [process for process in processes if process.pid not in trainer]

    try:
        assert page.stdout is not None
        url = re.search(rb"http://\S+", page.stdout.readline())
        assert url is not None
        threading.Thread(target=follow, args=(f"{url[0].decode()}events", seen), daemon=True).start()
        yield around
        send(signal.SIGCONT, around())
        run.halt.touch()
        assert launch.wait(PATIENCE_S) == 3, out.with_suffix(".log").read_text()[-3000:]
    finally:
        for started in (launch, page):
            started.kill()
            started.wait()
        receiver.close()
    assert receiver.accepted and seen.is_set() and any(copies.rglob("*.pt")), "there was nothing to measure"


def send(number: int, processes: list[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(number)


def cpu_seconds(processes: list[psutil.Process]) -> dict[str, float]:
    """User and system time by process and what it runs."""
    times = {" ".join(process.cmdline()[2:6]): process.cpu_times() for process in processes}
    return {name: used.user + used.system for name, used in times.items()}


def _until(condition: Callable[[], bool], out: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, out.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.1)


def follow(url: str, seen: threading.Event) -> None:
    """Read the page's events until it is gone."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url) as events:
        for line in events:
            if line.startswith(b"event: state"):
                seen.set()


def alternate(around: Callable[[], list[psutil.Process]], minutes: float) -> list[tuple[Block, Block]]:
    """Blocks with everything and without it, in turn; returns the pairs."""
    deadline, pairs = time.monotonic() + 60 * minutes, []
    while time.monotonic() < deadline:
        blocks = {}
        for number in (signal.SIGCONT, signal.SIGSTOP) if len(pairs) % 2 else (signal.SIGSTOP, signal.SIGCONT):
            send(number, around())
            begin = time.time()
            time.sleep(BLOCK_S)
            blocks[number] = (begin, time.time())
        pairs.append((blocks[signal.SIGCONT], blocks[signal.SIGSTOP]))
    return pairs


def delays(run: RunDirectory, pairs: list[tuple[Block, Block]]) -> dict[str, object]:
    """Delay in percent, from each pair's median and mean step, with 95% intervals from resampled pairs."""
    steps = [(beat.ts, beat.dt_step_s) for beat in read_heartbeats(run.heartbeat(0)) if beat.dt_step_s]

    def within(block: Block) -> list[float]:
        return [seconds for ts, seconds in steps if block[0] + seconds < ts < block[1]]

    timed = [(a, b) for on, off in pairs if (a := within(on)) and (b := within(off))]
    result: dict[str, object] = {"pairs": len(timed), "steps": sum(len(on) + len(off) for on, off in timed)}
    for name, measure in (("median", statistics.median), ("mean", statistics.mean)):
        percents = [100 * (measure(on) / measure(off) - 1) for on, off in timed]
        dice = random.Random(1)
        means = sorted(statistics.median(dice.choices(percents, k=len(percents))) for _ in range(RESAMPLES))
        interval = means[RESAMPLES // 40], means[-RESAMPLES // 40]
        result[f"{name}_step_ms_without"] = round(1000 * statistics.median(measure(off) for _, off in timed), 2)
        result[f"{name}_step_delay_percent"] = round(statistics.median(percents), 2)
        result[f"{name}_step_delay_interval"] = [round(value, 2) for value in interval]
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run.measure_delay", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args(argv)
    out = Path(tempfile.mkdtemp(prefix="tamis_delay_")) / "run"
    with launched(out) as around:
        time.sleep(LOADING_S)
        began, before = time.monotonic(), cpu_seconds(around())
        pairs = alternate(around, options.minutes)
        used, wall_s = cpu_seconds(around()), time.monotonic() - began
    result = delays(RunDirectory(out), pairs)
    shares = {name: 100 * (seconds - before.get(name, 0.0)) / wall_s for name, seconds in used.items()}
    result["percent_of_a_core"] = {name: round(share, 2) for name, share in shares.items()}
    for name, value in result.items():
        print(f"{name:<28}{value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
