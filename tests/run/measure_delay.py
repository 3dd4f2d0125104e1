"""Measure what messages, copies, cost and the live page add to a training step: `python -m tests.run.measure_delay`.

Pairs of runs of the real trainer: one under the supervisor alone, one as `tamis launch` with messages to a local HTTP
receiver, copies of every checkpoint, cost keys, OUT/live.html, and `tamis monitor --web` with a reader. The order in a
pair alternates. Runs by hand, because it takes minutes. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tamis.config import Config, build_config, load_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.supervise.supervisor import supervise
from tests.faults.forking_trainer import tiny_real_config
from tests.faults.launched import as_operators_do
from tests.run.notify.receiver import Receiver

ROOT = Path(__file__).parents[2]
WARM_UP = 30  # steps that are not counted
DIGEST_HOURS = 20 / 3600  # a message every 20 s is more than any operator asks for
LARGER = {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_ff": 256}


def config_for(out: Path, steps: int) -> Config:
    sections = tiny_real_config(out, steps=steps, seq_len=256, save_every=50, eval_every=0).model_dump()
    return build_config(sections | {"model": sections["model"] | LARGER})


def step_seconds(out: Path, *, everything: bool, steps: int) -> list[float]:
    """Train in `out`; returns the times of its steps."""
    out.mkdir(parents=True)
    file = out.with_suffix(".yaml")
    file.write_text(config_for(out, steps).to_yaml())
    environment = {**as_operators_do(), "OMP_NUM_THREADS": "1"}
    if everything:
        with operated(out) as (overrides, address):
            command = ["-m", "tamis", "launch", str(file), *overrides]
            _run(command, environment | {"TAMIS_NOTIFY": address}, out)
    else:
        _run(["-m", "tests.run.measure_delay", "--supervise", str(file)], environment, out)
    beats = read_heartbeats(RunDirectory(out).heartbeat(0))
    return [beat.dt_step_s for beat in beats if beat.phase == "step_end" and beat.dt_step_s and beat.step > WARM_UP]


def _run(arguments: list[str], environment: dict[str, str], out: Path) -> None:
    with open(out.with_suffix(".log"), "wb") as log:
        done = subprocess.run([sys.executable, "-u", *arguments], env=environment, stdout=log, stderr=log, cwd=ROOT)
    assert done.returncode == 0, out.with_suffix(".log").read_text()[-3000:]


@contextlib.contextmanager
def operated(out: Path) -> Iterator[tuple[list[str], str]]:
    """A receiver of messages and a read live page; yields the launch's overrides and the receiver's address."""
    receiver = Receiver()
    page = subprocess.Popen(
        [sys.executable, "-u", "-m", "tamis", "monitor", str(out), "--web", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert page.stdout is not None
    url = next(line for line in page.stdout if "http://" in line).split("http://")[1].split()[0]
    followed: list[int] = []
    threading.Thread(target=follow, args=(f"http://{url}events", followed), daemon=True).start()
    copies = out.with_suffix(".copies")
    keys = [f"copy.to=file://{copies}", "cost.per_hour=2.5", "cost.max=1000", f"notify.digest_hours={DIGEST_HOURS}"]
    try:
        yield keys, f"http://{receiver.place}/"
    finally:
        page.kill()
        page.wait()
        receiver.close()
    assert receiver.accepted and sum(followed) and any(copies.rglob("*.pt")), "nothing was measured"


def follow(url: str, followed: list[int]) -> None:
    """Read the page's events until it is gone."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url) as events:
        for line in events:
            followed.append(line.startswith(b"event: state"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run.measure_delay", description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=800, help="of each run")
    parser.add_argument("--supervise", metavar="FILE", help=argparse.SUPPRESS)  # the run of a pair that has nothing
    options = parser.parse_args(argv)
    if options.supervise:
        return supervise(load_config(options.supervise))
    os.chdir(tempfile.mkdtemp(prefix="tamis_delay_"))
    rows: list[dict[str, float]] = []
    for pair in range(options.pairs):
        times = {
            everything: step_seconds(
                Path(f"{pair}_{everything}").absolute(), everything=everything, steps=options.steps
            )
            for everything in ((False, True) if pair % 2 == 0 else (True, False))
        }
        off, on = times[False], times[True]
        rows.append(
            {
                "median_off_ms": 1000 * statistics.median(off),
                "median_on_ms": 1000 * statistics.median(on),
                "median_delay_percent": 100 * (statistics.median(on) / statistics.median(off) - 1),
                "mean_delay_percent": 100 * (statistics.mean(on) / statistics.mean(off) - 1),
            }
        )
        print("  ".join(f"{name} {value:.2f}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"steps": options.steps, **summary(rows)}))
    return 0


def summary(rows: list[dict[str, float]]) -> dict[str, object]:
    """The median over the pairs, and the lowest and highest of them."""
    columns = {name: sorted(row[name] for row in rows) for name in rows[0]}
    return {
        name: [round(value, 2) for value in (statistics.median(values), values[0], values[-1])]
        for name, values in columns.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
