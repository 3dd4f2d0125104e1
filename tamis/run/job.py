"""The main job, `tamis run`: looks at the machine, smokes, trains under supervision, and hands over. No torch here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tamis.config import Config, load_config
from tamis.config.legacy import variable_overrides
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.hardware import Gpu, read_gpus
from tamis.run.files.info import describe_run, write_eta, write_info
from tamis.run.files.lock import RunLock
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.handover.bundle import write_bundle
from tamis.run.handover.report import write_report
from tamis.run.launch import directory_for, halts_passed_on, launch_in_background
from tamis.run.plan import SHOWCASE_CONFIG, LaunchPlan, launch_plan
from tamis.run.supervise.supervisor import launch

RUNS = Path("artifacts/train_runs")
SMOKE_STEPS = 50
SAMPLE_TOKENS = 200


def main_job(config_path: str | None, overrides: list[str], detach: bool = False) -> int:
    """One command from a bare machine to a trained model; returns the exit code."""
    gpus = read_gpus()
    plan = launch_plan(gpus, config_path=config_path)
    config = _resolve(plan, overrides)
    if detach:
        return launch_in_background(config, ["run", *([config_path] if config_path else []), *overrides])
    out = directory_for(config)  # a refusal leaves nothing behind
    run_dir = RUNS / f"m7c_{time.strftime('%Y%m%d_%H%M%S')}"
    run_dir.mkdir(parents=True)
    _write_info(config, plan, gpus, run_dir)
    if gpus and (code := smoke(plan, run_dir, out)) != ExitCode.DONE:
        how = "was halted" if code == ExitCode.HALTED else f"failed with exit code {code}"
        _say(f"the smoke test {how}: nothing was launched. Read {run_dir / 'smoke.log'}")
        return code
    began = time.time()
    code = launch(config, processes=plan.processes, log=run_dir / "train.log")
    _hand_over(config, run_dir, code, began)
    return code


def _resolve(plan: LaunchPlan, overrides: list[str]) -> Config:
    """The plan's config with variables and overrides on top; says what decided, and what each variable does."""
    from_variables, effects = variable_overrides(os.environ)
    os.environ.update(plan.environment)
    chosen = [f"{name}={value}: set for this machine" for name, value in plan.environment.items()]
    for line in [*plan.reasons, *effects, *chosen]:
        _say(line)
    return load_config(plan.config_path, [*from_variables, *overrides])


def _write_info(config: Config, plan: LaunchPlan, gpus: list[Gpu], run_dir: Path) -> None:
    """run.info beside the logs and in OUT, and its main lines on the screen, before anything slow."""
    info = describe_run(
        config, config_path=plan.config_path, run_dir=run_dir, gpus=gpus, processes=plan.processes, command=sys.argv
    )
    for path in (run_dir / "run.info", RunDirectory(config.train.out_dir).create().run_info):
        write_info(path, info)
    for key in ("model", "parameters", "config_hash", "tokens_per_step", "tokens_planned", "out_dir"):
        _say(f"{key}: {info[key]:,}" if isinstance(info[key], int) else f"{key}: {info[key]}")


def smoke(plan: LaunchPlan, run_dir: Path, out: RunDirectory) -> int:
    """Fifty synthetic steps of the showcase model on every GPU: drivers, collectives, checkpoints, logging.

    Meanwhile `out`, the run's own directory, is held already, and a .HALT there counts.
    """
    _say(f"smoke test: {SMOKE_STEPS} synthetic steps")
    rehearsal = RunDirectory(run_dir / "smoke").create()
    overrides = [f"train.steps={SMOKE_STEPS}", "data.dataset=synthetic", f"train.out_dir={rehearsal.path}"]
    overrides += ["runtime.precision=bf16", f"train.save_every={SMOKE_STEPS}"]
    config = load_config(SHOWCASE_CONFIG, overrides)
    with RunLock(out.launch_lock) as lock, halts_passed_on(out, rehearsal, time.time()):
        lock.acquire("smoke test")
        return launch(config, processes=plan.processes, log=run_dir / "smoke.log")


def _hand_over(config: Config, run_dir: Path, code: int, began: float) -> None:
    """What the run was worth: figures and a sample when it is done, and in any case the report and its place."""
    run = RunDirectory(config.train.out_dir)
    if code == ExitCode.DONE:
        write_eta(run_dir / "run.info", "done")
        _compare_with_counting(config, run)
        sample = _start_sample(config, run)  # beside the bundle: each waits mostly for its own start of torch
        if _was_trained_since(run, began):  # else its bundle is there already
            write_bundle(run.path, say=_say)
        if sample is not None:
            _show_sample(config, sample)
    _say(f"logs: {run_dir}   model and curves: {run.path}   report: {write_report(run)}")


def _was_trained_since(run: RunDirectory, moment: float) -> bool:
    step = latest_valid_checkpoint(run)
    return step is not None and run.checkpoint(step).stat().st_mtime >= moment


def _compare_with_counting(config: Config, run: RunDirectory) -> None:
    """Beside the showcase's validation loss: what counting bytes would reach on the same text."""
    loss = json.loads(run.metrics_json.read_text(encoding="utf-8")).get("val_loss")
    if config.data.dataset != "sample" or config.data.tokenizer != "byte" or loss is None:
        return
    from tamis.data import validation_batches
    from tamis.data.sample import entropies

    counted = entropies(config, validation_batches(config))
    _say(
        f"validation loss {loss:.4f} nats per byte; counting single bytes reaches {counted.unigram:.4f}, "
        f"pairs of bytes {counted.bigram:.4f}"
    )


def _start_sample(config: Config, run: RunDirectory) -> subprocess.Popen[str] | None:
    step = latest_valid_checkpoint(run)
    if config.train.sample_prompt is None or step is None:
        return None
    command = [sys.executable, "-m", "tamis", "generate", str(run.checkpoint(step))]
    command += ["--prompt", config.train.sample_prompt, "--max-new-tokens", str(SAMPLE_TOKENS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _show_sample(config: Config, sample: subprocess.Popen[str]) -> None:
    text, problem = sample.communicate()
    if sample.returncode:
        _say(f"no sample: {problem.strip()}")
    else:
        _say(f"the model continues {config.train.sample_prompt!r}:")
        print(text, flush=True)


def _say(text: str) -> None:
    print(f"[tamis] {text}", flush=True)
