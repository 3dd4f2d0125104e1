"""The end of `tamis run`: figures and a sample of a finished model, its bundle, and the report in any case."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tamis.config import Config
from tamis.run.files.console import printable, say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.info import write_eta
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.run.files.reading import read_json
from tamis.run.handover.bundle import write_bundle
from tamis.run.handover.report import write_report

SAMPLE_TOKENS = 200


def finish_run(config: Config, logs: Path, code: int, began: float) -> None:
    """Print what a run that ended with `code` has achieved, hand it over if it is done or halted, write the report."""
    run = RunDirectory(config.train.out_dir)
    sample = None
    if code == ExitCode.DONE:
        write_eta(logs / "run.info", "done")
        _compare_with_counting(config, run)
        sample = _start_sample(config, run)  # during the handoff: each mostly waits for its own start of torch
    if has_ended(run, config, began):  # else its bundle exists already
        write_bundle(run.path, say=say)
    if sample is not None:
        _show_sample(config, sample)
    say(f"logs: {logs}   model and curves: {run.path}   report: {write_report(run)}")
    if code == ExitCode.DONE:
        out = shlex.quote(str(run.path))
        say(f'next: tamis generate {out} "some text"   tamis eval {out}   tamis serve {out}')


def has_ended(run: RunDirectory, config: Config, began: float) -> bool:
    """True if the run was trained since `began`, and is done or was stopped on request: then it is handed over."""
    step = latest_valid_checkpoint(run)
    if step is None or run.checkpoint(step).stat().st_mtime < began:
        return False
    last = read_heartbeats(run.heartbeat(0), tail=1)
    return step == config.train.steps or (bool(last) and last[-1].phase == "halted")


def _compare_with_counting(config: Config, run: RunDirectory) -> None:
    """Print the showcase's validation loss, and what counting bytes reaches on the same text."""
    loss = _validation_loss(run)
    if config.data.dataset != "sample" or config.data.tokenizer != "byte" or loss is None:
        return
    from tamis.data import validation_batches
    from tamis.data.sample import entropies

    counted = entropies(config, validation_batches(config))
    say(
        f"validation loss {loss:.4f} nats per byte; counting single bytes reaches {counted.unigram:.4f}, "
        f"pairs of bytes {counted.bigram:.4f}"
    )


def _validation_loss(run: RunDirectory) -> float | None:
    """The final validation loss in metrics.json; None where it holds none."""
    try:
        loss = read_json(run.metrics_json)["val_loss"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return loss if isinstance(loss, float) else None


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
        say(f"no sample: {problem.strip()}")
    else:
        say(f"the model continues {config.train.sample_prompt!r}:")
        print(printable(text), flush=True)
