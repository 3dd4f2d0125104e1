"""Seeded odd files in a fabricated run, and every program that reads runs applied to it."""

import json
import os
import random
import shutil
import subprocess
import traceback
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from unittest import mock

from rich.console import Console

from tamis.run.checks.criteria import checkpoints
from tamis.run.checks.runbooks import judge_run
from tamis.run.file_problems import file_problems
from tamis.run.files.directory import RunDirectory
from tamis.run.files.halt import HaltFile
from tamis.run.files.lock import RunLock
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.handover import bundle
from tamis.run.limits import Limits
from tamis.run.locate import existing_run
from tamis.run.monitor.command import show_run
from tamis.run.supervise.sampler import refresh_eta
from tamis.run.supervise.usage import HEADER, usage_csv
from tamis.run.supervise.watchdog import Watchdog
from tests.run.fabricate import Story, config_of, fabricate

STORY = Story(steps=25)
DEEP = b"[" * 100_000
JSON_VALUES = [
    None,
    True,
    -1,
    10**400,
    "x",
    "nan",
    float("nan"),
    float("inf"),
    1e308,
    [],
    [[]],
    {},
    {"a": [1]},
    "\x1b[2J",
]


def targets(run: RunDirectory) -> list[Path]:
    files = [run.config_yaml, run.run_info, run.metrics_json, run.env_json, run.events, run.halt, run.anomaly]
    files += [run.training_csv, run.val_csv, run.train_log, run.lock, run.launch_lock, run.trainer_lock, usage_csv(run)]
    files += [run.path / "go_no_go.json", run.path / "preflight.json", run.eval_json, run.samples]
    files += [run.checkpoint(20), run.manifest(20)]
    return [*files, *run.heartbeats().values(), run.path / "heartbeat_rank7.jsonl"]


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def mutations(rng: random.Random) -> dict[str, Callable[[Path], object]]:
    def changed_json(path: Path) -> None:
        """Replace, drop or add fields of a JSON document or of some JSON lines."""
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [path.read_text()] if path.suffix == ".json" and path.exists() else lines
        out = []
        for text in whole or ["{}"]:
            try:
                value = json.loads(text)
            except ValueError:
                value = {}
            if isinstance(value, dict):
                for name in rng.sample(sorted(value), min(len(value), rng.randint(1, 3))):
                    value[name] = rng.choice(JSON_VALUES)
                    if rng.random() < 0.3:
                        del value[name]
            out.append(json.dumps(value))
        path.write_text("\n".join(out) + "\n")

    def noise(path: Path) -> None:
        path.write_bytes(rng.randbytes(rng.randint(1, 5000)))

    return {
        "folder": lambda p: replace(p, lambda q: q.mkdir()),
        "folder with files": lambda p: replace(p, lambda q: (q.mkdir(), (q / "x").write_text("x"))),
        "FIFO": lambda p: replace(p, os.mkfifo),
        "link to itself": lambda p: replace(p, lambda q: q.symlink_to(q.name)),
        "link out": lambda p: replace(p, lambda q: q.symlink_to("/etc/passwd")),
        "link to a device": lambda p: replace(p, lambda q: q.symlink_to("/dev/zero")),
        "dangling link": lambda p: replace(p, lambda q: q.symlink_to("nothing")),
        "empty": lambda p: p.write_bytes(b""),
        "binary": noise,
        "deeply nested": lambda p: p.write_bytes(DEEP + b"\n"),
        "one long line": lambda p: p.write_bytes(b"x" * 9_000_000),
        "wrong types": changed_json,
        "wrong type at the top": lambda p: p.write_text(json.dumps(rng.choice(JSON_VALUES)) + "\n"),
        "NaN rows": lambda p: p.write_text("step,loss,lr,toks_per_s\n" + "nan,nan,nan,nan\n1,inf,-inf,nan\n" * 10),
        "YAML aliases": lambda p: p.write_text("a: &a [x]\n" + "b: &b [*a,*a]\nc: [*b,*b]\n"),
        "cut": lambda p: p.write_bytes(p.read_bytes()[:-7] if p.is_file() else b"{"),
        "many rows": lambda p: p.write_bytes((p.read_bytes() if p.is_file() else b"1,1,1,1\n") * 200),
    }


ALWAYS_NAMED = ("folder", "folder with files", "FIFO", "link to itself", "link out", "link to a device")


def readers(run: RunDirectory) -> dict[str, Callable[[], object]]:
    def halting() -> None:
        halt = HaltFile(run.halt)
        if halt.requested():
            halt.consume()
        assert not halt.requested()

    def watching() -> None:
        watchdog = Watchdog(run, Limits())
        watchdog.look()
        watchdog.begin(2)
        watchdog.look()

    def locking() -> None:
        for path in (run.lock, run.launch_lock, run.trainer_lock):
            lock = RunLock(path)
            lock.is_held()
            lock.refusal()

    return {
        "existing_run": lambda: existing_run(run.path),
        "monitor --once": lambda: show_run(run.path, once=True),
        "monitor --json": lambda: show_run(run.path, as_json=True),
        "watchdog": watching,
        "locks": locking,
        "checkpoints": lambda: latest_valid_checkpoint(run, on_damaged=lambda message: None),
        "ETA": lambda: refresh_eta(run, config_of(run.path, STORY), 2),
        "judge": lambda: judge_run(run.path, console=Console(file=StringIO())),
        "handoff": lambda: bundle.write_bundle(run.path, output=run.path.parent / "b.tar", say=lambda line: None),
        "halt": halting,
    }


def prepared_run(folder: Path) -> Path:
    """A run with every file that a target can replace."""
    run = fabricate(folder / "original", STORY)
    run.metrics_json.write_text('{"val_loss": 2.2}')
    run.env_json.write_text("{}")
    run.halt.write_text("lunch\n")
    run.anomaly.write_text("gate_collapse\nreason\n")
    (run.path / "preflight.json").write_text('{"verdict": "GO", "findings": []}')
    finding = {"status": "pass", "evidence": "1", "at": 1.0, "name": "n", "remedy": ""}
    texts = dict.fromkeys(("title", "directory", "judged_at", "key", "verdict"), "x")
    record = {"phase": 1, "go": True, "findings": [finding], **texts}
    (run.path / "go_no_go.json").write_text(json.dumps({"phases": [record]}))
    usage_csv(run).write_text(f"{HEADER}\n1780000010.0,0,1,2,90,1200,640,88,heat\n")
    for lock in (run.lock, run.launch_lock, run.trainer_lock):
        lock.write_text('{"pid": 4194400, "host": "h", "purpose": "train"}\n')
    return run.path


def failures_of(seed: int, original: Path, folder: Path) -> list[str]:
    """Make one odd file, run every reader; a line for each that raised or did not name the file."""
    rng = random.Random(seed)
    out = folder / f"case{seed}" / "out"
    shutil.copytree(original, out)
    run = RunDirectory(out)
    target = rng.choice(targets(run))
    kind, mutate = rng.choice(sorted(mutations(rng).items()))
    mutate(target)
    case, failures = f"case {seed}, {kind} in place of {target.name}", []
    if kind in ALWAYS_NAMED and target != run.checkpoint(20):
        problems = file_problems(run)
        if not any(target.name in problem for problem in problems):
            failures.append(f"{case}: not named by {problems}")
    failures += reader_failures(run, case)
    shutil.rmtree(out.parent)
    return failures


def reader_failures(run: RunDirectory, case: str) -> list[str]:
    """A line for each reader that raised."""
    failures = []
    no_child = mock.Mock(return_value=subprocess.CompletedProcess([], 1, "", "no torch here"))
    with (
        mock.patch.object(checkpoints.subprocess, "run", no_child),
        mock.patch.object(bundle, "_write_weights", lambda checkpoint, target: "not here"),
    ):
        for name, read in readers(run).items():
            try:
                read()
            except Exception:
                failures.append(f"{case}: {name} raised\n{traceback.format_exc(limit=-4)}")
    return failures
