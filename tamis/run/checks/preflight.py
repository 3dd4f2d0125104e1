"""`tamis check`: numbered checks of whether this machine is ready for a run, each with its evidence and its remedy.

Checks that need torch or the network run in a child process with a time limit, so that none of them can block the rest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tamis.config import Config
from tamis.run.checks.findings import (
    Criterion,
    Finding,
    failed,
    has_failed,
    not_applicable,
    pass_if,
    verdict,
    write_findings,
)
from tamis.run.checks.machine import MACHINE_CHECKS, Subject
from tamis.run.files.console import announced, print_line, printable_line
from tamis.run.files.hardware import Gpu, read_gpus
from tamis.run.supervise.worker_processes import torchrun_command

TAMIS = [sys.executable, "-m", "tamis"]
QUICK = "; quick: collectives, data and model were not tried"
FAILED = "FAILED: "  # begins the line with which a child gives its reason
CHILD_TIMEOUT_S = {"collectives": 120, "data": 180, "verify": 600}


def run_preflight(
    config: Config,
    *,
    gpus: Sequence[Gpu] | None = None,
    quick: bool = False,
    emit: Callable[[str], None] = print_line,
) -> int:
    """Run every check, emit each result at once, and store all in OUT/preflight.json. Returns 0 if ready, else 1.

    `quick` leaves out the three that start torch or read the data.
    """
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch:
        config_file = Path(scratch) / "config.yaml"
        config_file.write_text(config.to_yaml(), encoding="utf-8")
        subject = Subject(config, config_file, read_gpus() if gpus is None else gpus)
        for finding in _all_findings(subject, quick):
            findings.append(finding)
            emit(_line(len(findings), finding))
    emit(f"preflight: {verdict(findings)}{QUICK if quick else ''}")
    with suppress(OSError):  # a directory that cannot be written has a failed check above
        write_findings(subject.out_dir / "preflight", "Preflight", findings, config_hash=config.hash)
    return 1 if has_failed(findings) else 0


def _all_findings(subject: Subject, quick: bool) -> Iterator[Finding]:
    yield from (criterion.apply(subject) for criterion in MACHINE_CHECKS)
    if quick:
        return
    for criterion in CHILD_CHECKS:
        with announced(f"trying: {criterion.name}"):
            finding = criterion.apply(subject)
        yield finding
    with announced("trying: kernels, causality and the random-token floor on this device"):
        findings = model_is_right(subject)
    yield from findings


def collectives_work(subject: Subject) -> Finding:
    processes = len(subject.gpus)
    if processes < 2:
        return not_applicable("fewer than two GPUs: nothing to connect")
    torchrun = torchrun_command(processes)
    return _child_finding([*torchrun, "-m", "tamis.train.tools.collective_check"], "collectives")


def data_is_reachable(subject: Subject) -> Finding:
    command = [*TAMIS, "data", "check", str(subject.config_file), "--batches", "2", "--resolved"]
    return _child_finding(command, "data")


def model_is_right(subject: Subject) -> list[Finding]:
    """Compare kernels with the reference, and test causality and the random-token floor, on the training device."""
    answer = _child([*TAMIS, "verify", str(subject.config_file), "--json", "--resolved"], "verify")
    if isinstance(answer, str):
        return [Finding("fail", answer, name=MODEL, remedy=VERIFY_REMEDY)]
    try:
        results = _results(answer.stdout)
        findings = [_result_finding(result) for result in results]
    except (ValueError, KeyError, TypeError, IndexError):
        return [Finding("fail", _last_line(answer), name=MODEL, remedy=VERIFY_REMEDY)]
    if not any(finding.name.startswith("attention") for finding in findings):
        findings.insert(0, Finding("not applicable", "no kernels on this device: the reference computes", name=KERNELS))
    if answer.returncode and not has_failed(findings):
        findings.append(failed(f"tamis verify ended with exit code {answer.returncode}", VERIFY_REMEDY))
    return findings


MODEL = "the model is verified"
KERNELS = "attention kernels agree with the reference"
VERIFY_REMEDY = "do not train: run tamis verify alone, and report its output with env.json"
CHILD_CHECKS = (
    Criterion(
        "collectives across the GPUs",
        collectives_work,
        "set NCCL_P2P_DISABLE=1 and NCCL_DEBUG=INFO, then see which pair of GPUs fails",
    ),
    Criterion(
        "data can be read",
        data_is_reachable,
        "check the network and HF_DATASETS_CACHE, or set data.dataset: local with data.local_path",
    ),
)


def _child_finding(command: list[str], name: str) -> Finding:
    """Judge a child by its exit code; its last line is the evidence."""
    answer = _child(command, name)
    if isinstance(answer, str):
        return failed(answer)
    return pass_if(answer.returncode == 0, _last_line(answer))


def _child(command: list[str], name: str) -> subprocess.CompletedProcess[str] | str:
    """Run a child; returns a sentence when it does not finish in time."""
    limit = CHILD_TIMEOUT_S[name]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit} s from {' '.join(command[1:4])}"


def _results(stdout: str) -> list[dict[str, Any]]:
    """Parse the JSON document in the last line; libraries may print other lines before it."""
    results = json.loads(stdout.strip().splitlines()[-1])["checks"]
    if not results:
        raise ValueError("no results")
    return list(results)


def _result_finding(result: dict[str, Any]) -> Finding:
    evidence = f"measured {float(result['measured']):.4g}, limit {float(result['limit']):.4g}"
    evidence += f" ({result['detail']})" if result.get("detail") else ""
    status, remedy = ("pass", "") if result["passed"] is True else ("fail", VERIFY_REMEDY)
    return Finding(status, evidence, name=str(result["name"]), remedy=remedy)  # type: ignore[arg-type]


def _line(number: int, finding: Finding) -> str:
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{number:2d}. {finding.status.upper():14s} {finding.name}: {printable_line(finding.evidence)}{remedy}"


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    """The child's last line on stdout, or its exit code with the last line on stderr when it crashed."""
    output, errors = answer.stdout.strip().splitlines()[-1:], answer.stderr.strip().splitlines()[-1:]
    if output and (answer.returncode == 0 or output[0].startswith(FAILED)):
        return output[0].removeprefix(FAILED)
    return f"it ended with exit code {answer.returncode}: {(errors or output or ['no output'])[0]}"
