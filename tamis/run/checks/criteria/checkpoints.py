"""Criteria on a run's checkpoints: saved, intact, loadable."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

from tamis.config import Config
from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, failed, not_applicable, not_measured, pass_if, passed
from tamis.run.files.console import counted
from tamis.run.files.manifest import damage, read_manifest

LOAD_TIMEOUT_S = 600


def first_checkpoint_was_saved(evidence: Evidence) -> Finding:
    """Require a checkpoint from the first save on; a later one counts, because retention removes the oldest."""
    step = (evidence.config or Config()).train.save_every
    if evidence.planned_steps is not None and evidence.planned_steps < step:
        steps = counted(evidence.planned_steps, "step")
        return not_applicable(f"the run has {steps} in all, fewer than train.save_every {step}")
    if evidence.last_step < step:
        return not_measured(f"the run is at step {evidence.last_step}, before the first save at {step}")
    kept = [saved for saved in evidence.directory.checkpoints() if saved >= step]
    return pass_if(bool(kept), f"checkpoints kept from step {step} on: {', '.join(map(str, kept)) or 'none'}")


def checkpoints_intact(evidence: Evidence) -> Finding:
    steps = evidence.directory.checkpoint_traces()
    if not steps:
        return failed("there is no checkpoint")
    for step in steps:
        if problem := damage(evidence.directory.manifest(step)):
            return failed(f"checkpoint of step {step}: {problem}")
    return passed(
        f"sha256 of {counted(len(steps), 'checkpoint')} as written (saved at step {', '.join(map(str, steps))})"
    )


def newest_checkpoint_loads(evidence: Evidence) -> Finding:
    """Load it in a child process with the function that a resume calls."""
    steps = evidence.directory.checkpoints()
    if not steps:
        return failed("there is no checkpoint")
    path, config = evidence.directory.checkpoint(steps[-1]), evidence.directory.config_yaml
    if problem := _problem_with_loading(path, config, _version(path), _version(config)):
        return failed(f"{path.name} {problem}")
    manifest = read_manifest(evidence.directory.manifest(steps[-1]))
    return passed(f"{path.name} loaded ({manifest['bytes'] / 1e6:,.0f} MB, written {manifest['time']})")


def _version(path: Path) -> tuple[int, int] | None:
    """When the file was written, and its size; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@cache  # a launch judges the same files for its last phase, its criteria and its bundle
def _problem_with_loading(path: Path, config: Path, *versions: tuple[int, int] | None) -> str | None:
    if path.is_file() and not zipfile.is_zipfile(path):
        return "does not load: it is not an archive as torch.save writes it"
    command = [sys.executable, "-m", "tamis", "verify-checkpoint", str(path), str(config)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"did not load within {LOAD_TIMEOUT_S} s"
    return f"does not load: {_error_line(done.stderr)}" if done.returncode else None


def _error_line(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["no reason given"]
    error = next((line for line in lines if re.match(r"(error:|\S*(Error|Exception)\b)", line)), lines[-1])
    return error.removeprefix("error: ")[:200]
