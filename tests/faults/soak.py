"""Inject seeded faults into real supervised runs: `python -m tests.faults.soak --kills 100` or `--minutes 120`.

Every run must end like an unbroken one: the same curves, and the same final checkpoint bit for bit. Runs by hand,
because it takes minutes. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import Heartbeat, HeartbeatFollower, read_heartbeats
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.supervise.supervisor import LaunchOptions
from tests.faults.forking_trainer import PATIENCE_S, tiny_real_config
from tests.faults.launched import Launched
from tests.faults.test_real_trainer import assert_same_end

KILLS_PER_RUN = 10
FOR_KILLS = {"steps": 64, "save_every": 4, "eval_every": 16}
FOR_SOAK = {"steps": 1500, "save_every": 10, "eval_every": 500, "max_unsaved_steps": 200}  # half a minute, not seconds
STEP_WAITS_S = 0.15  # in a soak: what a device would compute, so that the cores stay free
UNLIMITED: dict[str, Any] = {"RESTARTS": "1000000", "WITHOUT_PROGRESS": "1000000", "FIRST_DELAY_S": "2"}
MOMENTS = ("boot", "step_start", "progress", "step_end", "checkpoint", "checkpoint")
LAUNCH_ENDS_WITH = {"kill_supervisor": -signal.SIGKILL, "halt": ExitCode.HALTED, "fill_disk": ExitCode.ANOMALY}
RELAUNCHED = ("kill_supervisor", "halt")
EXPLAINS = {"stop": ["stopped_rank"], "fill_disk": ["disk_full"], "damage": ["checkpoint_unloadable"]}
EXPLAINS_FOR_S = 30.0  # after the end of a fault
PARTS = ("until_start", "imports", "opens", "first_step", "steps_again")  # of the seconds that a restart costs
ROOM_BYTES = 20_000  # per file while the disk counts as full: less than a checkpoint


class FaultyRun:
    """One run from its first launch to its last step, with the faults that were injected."""

    def __init__(self, config: Config, seed: str, waits_s: float = 0.0) -> None:
        self.config, self.dice, self.run = config, random.Random(seed), RunDirectory(config.train.out_dir)
        self.waits_s = waits_s
        self.faults: list[tuple[str, float, float]] = []  # kind, begin, end
        self.launches, self.wall_s, self.is_same, self.step = 0, 0.0, False, 0
        self._killed: set[int] = set()
        self._follower = HeartbeatFollower(self.run.heartbeat(0))
        self._began = time.monotonic()
        self._launch()

    def _launch(self) -> None:
        self.launches += 1
        settings: dict[str, Any] = (
            {"TRAINER": "paced", "STEP_WAITS_S": str(self.waits_s)} if self.waits_s else {"TRAINER": "real"}
        ) | {"SPARE_AFTER_S": str(LaunchOptions.spare_after_s)}
        self.launched = Launched(self.config, OMP_NUM_THREADS="1", **settings, **UNLIMITED)

    def is_done(self) -> bool:
        """True when the run ended after its last step. A launch that was ended by a fault is launched again."""
        code = self.launched.process.poll()
        if code:
            allowed = {LAUNCH_ENDS_WITH.get(kind) for kind, _, _ in self.faults}
            assert code in allowed, f"{self.run.path} ended with {code}:\n{self.launched.told()[-3000:]}"
            self.launched.end()
            self._launch()
        return code == 0

    def wait(self, seconds: float = float("inf")) -> None:
        """Let the run continue for some seconds, or to its end."""
        deadline = time.monotonic() + seconds
        while not self.is_done() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.wall_s = time.monotonic() - self._began

    def inject(self, kind: str) -> None:
        """Inject a fault. None is recorded when the worker ends before it can happen."""
        self._follower.poll()  # skip the beats of the past
        pid, begin = self._until(lambda beat: True), time.time()
        try:
            happened = FAULTS[kind](self, pid) if pid else None
        except ProcessLookupError:
            return
        if happened:
            self.faults.append((happened, begin, time.time()))

    def _until(self, condition: Callable[[Heartbeat], bool]) -> int:
        """Wait for a new beat that meets the condition; returns the worker's pid, 0 when the launch has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.launched.process.poll() is None:
            for beat in self._follower.poll():
                if beat.pid not in self._killed and condition(beat):
                    self.step = beat.step
                    return beat.pid
            assert time.monotonic() < deadline, f"no worker trains:\n{self.launched.told()[-3000:]}"
            time.sleep(0.002)
        return 0

    def kill_worker(self, pid: int) -> str | None:
        """Kill the worker in a random phase, while it starts or up to two save intervals later."""
        moment, delay_s = self.dice.choice(MOMENTS), self.dice.uniform(0, 0.01)
        steps = self.dice.randrange(2 * self.config.train.save_every)
        if moment == "boot":
            delay_s *= 300
        elif self._until(lambda beat: beat.phase == "step_start"):
            target = self.step + steps
            pid = self._until(lambda beat: beat.phase == moment and beat.step >= target)
        time.sleep(delay_s)
        return self._kill(pid) if pid else None

    def _kill(self, pid: int) -> str:
        os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        last = [beat.phase for beat in read_heartbeats(self.run.heartbeat(0), tail=20) if beat.pid == pid]
        return f"kill in {last[-1] if last else 'boot'}"

    def kill_supervisor(self, pid: int) -> str:
        self.launched.process.kill()
        self.launched.wait()
        return "kill_supervisor"

    def stop_worker(self, pid: int) -> str:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.dice.uniform(2, 15))
        os.kill(pid, signal.SIGCONT)
        return "stop"

    def halt(self, pid: int) -> str:
        self.run.halt.touch()
        self.launched.wait()
        return "halt"

    def damage_checkpoint(self, pid: int) -> str:
        """Change one byte of the newest valid checkpoint, if an older one is there to resume from; kill the worker."""
        os.kill(pid, signal.SIGSTOP)  # no save and no deletion in between
        newest = latest_valid_checkpoint(self.run) if len(self.run.checkpoints()) > 1 else None
        if newest is not None:
            flip_byte(self.run.checkpoint(newest))
            if latest_valid_checkpoint(self.run, on_damaged=lambda message: None) is None:
                flip_byte(self.run.checkpoint(newest))
                newest = None
        killed = self._kill(pid)
        return killed if newest is None else "damage"

    def fill_disk(self, pid: int) -> str | None:
        """For some seconds, no file of a worker that trains can grow beyond ROOM_BYTES."""
        if not (pid := self._until(lambda beat: beat.phase == "step_start")):
            return None
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
        time.sleep(self.dice.uniform(2, 5))
        if psutil.pid_exists(pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        return "fill_disk"

    def compare(self, unbroken: RunDirectory) -> None:
        try:
            assert_same_end(self.run, unbroken)
            self.is_same = True
        except AssertionError as error:
            print(f"{self.run.path} differs from the unbroken run: {error}", flush=True)

    def losses(self) -> list[tuple[str, dict[str, float]]]:
        """For each fault, the seconds from the last step before it ended until training was further, and their parts.

        Steps that were made in this time count as kept. A worker that starts again splits the seconds: until it starts,
        imports, opens data and model, what its first step takes longer, the steps computed again.
        """
        beats = read_heartbeats(self.run.heartbeat(0))
        ends = [beat for beat in beats if beat.phase == "step_end"]
        starts = [event["ts"] for event in read_events(self.run) if event["event"] == "start"]
        step_s = statistics.median(beat.dt_step_s or 0.0 for beat in ends)
        found = []
        for kind, _, end in self.faults:
            if kind in RELAUNCHED:  # the worker went on until it noticed
                end = next((ts for ts in starts if ts > end), end)
            before = max((beat for beat in ends if beat.ts <= end), key=lambda beat: beat.step, default=None)
            further = next((b for b in ends if before and b.ts > end and b.step > before.step), None)
            if before is None or further is None:
                continue
            ready = {p: _last_ts(beats, p, before.ts, further.ts) for p in ("boot", "compile")}
            began = max((ts for ts in starts if before.ts <= ts <= further.ts), default=None)
            marks = [before.ts, began, ready["boot"], ready["compile"]]
            if None not in marks and further.pid != before.pid:
                marks += [next(b.ts for b in ends if b.pid == further.pid), further.ts]
                parts = dict(zip(PARTS, (b - a for a, b in pairwise(marks)), strict=True))  # type: ignore[operator, type-var]
                parts["first_step"] -= step_s
            else:
                parts = {}
            lost_s = further.ts - before.ts - (further.step - before.step) * step_s
            found.append((kind, {"all": lost_s, **parts}))
        return found

    def false_alarms(self) -> list[str]:
        """The alarms that no injected fault explains."""
        alarms = [(e["event"], e["ts"]) for e in read_events(self.run) if "severity" in e["evidence"]]
        return [
            alarm
            for alarm, ts in alarms
            if not any(a <= ts <= b + EXPLAINS_FOR_S and alarm in EXPLAINS.get(kind, []) for kind, a, b in self.faults)
        ]


FAULTS: dict[str, Callable[[FaultyRun, int], str | None]] = {
    "kill_worker": FaultyRun.kill_worker,
    "kill_supervisor": FaultyRun.kill_supervisor,
    "stop": FaultyRun.stop_worker,
    "halt": FaultyRun.halt,
    "damage": FaultyRun.damage_checkpoint,
    "fill_disk": FaultyRun.fill_disk,
}


def _last_ts(beats: list[Heartbeat], phase: str, after: float, until: float) -> float | None:
    return max((beat.ts for beat in beats if beat.phase == phase and after <= beat.ts <= until), default=None)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def inject_faults(options: argparse.Namespace, lane: int, unbroken: FaultyRun) -> list[FaultyRun]:
    """Run after run until this lane's share of the kills, or the time, is used up."""
    runs: list[FaultyRun] = []
    kills = len(range(lane, options.kills or 0, options.lanes))
    deadline = time.monotonic() + 60 * (options.minutes or 0)

    def more() -> bool:
        return sum(len(run.faults) for run in runs) < kills or time.monotonic() < deadline

    while more():
        name = f"{options.seed}_{lane}_{len(runs)}"
        runs.append(run := FaultyRun(config_for(options, name), name, waits_s(options)))
        try:
            while not run.is_done():
                if options.minutes:
                    run.wait(run.dice.uniform(0.5, 1.5) * options.every)
                if not more() or (options.kills and len(run.faults) >= KILLS_PER_RUN):
                    run.wait()
                elif not run.is_done():
                    run.inject("kill_worker" if options.kills else run.dice.choice(list(FAULTS)))
            run.wait()
        finally:
            run.launched.end()
        run.compare(unbroken.run)
        print(f"{run.run.path}: {len(run.faults)} faults, identical: {run.is_same}", flush=True)
    return runs


def waits_s(options: argparse.Namespace) -> float:
    return STEP_WAITS_S if options.minutes else 0.0


def config_for(options: argparse.Namespace, name: str) -> Config:
    train = FOR_KILLS if options.kills else FOR_SOAK
    config = tiny_real_config(options.out / name, **train | ({"steps": options.steps} if options.steps else {}))
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"deterministic": True})})


def figures(runs: list[FaultyRun]) -> dict[str, Any]:
    """Counts over all runs; the time of kept steps is their number times the median step."""
    faults = Counter(kind for run in runs for kind, _, _ in run.faults)
    steps = [[b for b in read_heartbeats(run.run.heartbeat(0)) if b.phase == "step_end"] for run in runs]
    kept = sum(run.config.train.steps for run in runs)
    lost = sum(len(ends) - len({beat.step for beat in ends}) for ends in steps)
    step_s = statistics.median(beat.dt_step_s or 0.0 for ends in steps for beat in ends)
    wall_s = sum(run.wall_s for run in runs)
    events = [event for run in runs for event in read_events(run.run)]
    losses = [loss for run in runs for loss in run.losses()]
    return {
        "faults": faults.total(),
        "faults_by_kind": dict(sorted(faults.items())),
        "mean_seconds_lost_by_kind": {kind: mean_parts(kind, losses) for kind in sorted(faults)},
        "runs": len(runs),
        "launches": sum(run.launches for run in runs),
        "restarts_by_supervisor": sum(event["event"] == "restart" for event in events),
        "starts_of_spare_workers": sum(event["evidence"].get("spare") is True for event in events),
        "steps_kept": kept,
        "steps_lost": lost,
        "median_step_ms": round(1000 * step_s, 1),
        "kept_share_of_steps": round(kept / (kept + lost), 4),
        "kept_share_of_wall_time": round(kept * step_s / wall_s, 4),
        "wall_s": round(wall_s),
        "lost_share_of_wall_time": lost_shares(losses, wall_s, kept * step_s),
        "false_alarms": [alarm for run in runs for alarm in run.false_alarms()],
        "identical": all(run.is_same for run in runs),
    }


def lost_shares(losses: list[tuple[str, dict[str, float]]], wall_s: float, kept_s: float) -> dict[str, float]:
    """What took the time that no kept step used; the rest is first starts, saves and evaluations."""
    seconds: Counter[str] = Counter()
    for kind, parts in losses:
        cause = "stopped" if kind == "stop" else "relaunches" if kind in RELAUNCHED else "restarts"
        again = parts.get("steps_again", 0.0)
        seconds.update({cause: parts["all"] - again, "steps_again": again})
    seconds["rest"] = wall_s - kept_s - seconds.total()
    return {cause: round(value / wall_s, 4) for cause, value in seconds.items()}


def mean_parts(kind: str, losses: list[tuple[str, dict[str, float]]]) -> dict[str, float]:
    """The mean of each part over the losses of one kind; only restarts have parts."""
    of_kind = [parts for name, parts in losses if name == kind]
    names = {name: None for parts in of_kind for name in parts}
    return {name: round(statistics.mean(p[name] for p in of_kind if name in p), 2) for name in names}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--kills", type=int, help="number of SIGKILLs of workers")
    mode.add_argument("--minutes", type=float, help="how long to inject faults of all kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, help="runs at the same time; default 2 with --kills, 1 with --minutes")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between faults, with --minutes")
    parser.add_argument("--steps", type=int, help="steps of each run")
    options = parser.parse_args(argv)
    options.lanes = options.lanes or (2 if options.kills else 1)
    options.out = Path(tempfile.mkdtemp(prefix="tamis_soak_"))
    unbroken = FaultyRun(config_for(options, "unbroken"), "")  # its steps need not wait
    unbroken.wait()
    with ThreadPoolExecutor(options.lanes) as pool:
        lanes = pool.map(lambda lane: inject_faults(options, lane, unbroken), range(options.lanes))
        runs = [run for lane in lanes for run in lane]
    result = figures(runs)
    result["false_alarms"] += unbroken.false_alarms()
    for name, value in result.items():
        print(f"{name:<26}{value}")
    print(json.dumps(result))
    passed = result["identical"] and not result["false_alarms"]
    if passed:
        shutil.rmtree(options.out)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
