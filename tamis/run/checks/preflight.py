"""`tamis check`: is this machine ready for this run? Numbered checks, each with its evidence and its remedy.

Whatever needs torch or the network runs in a child process with a time limit, so that nothing can wedge the check.
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
from tamis.run.checks.findings import Criterion, Finding, failed, is_go, judged, not_measured, verdict, write_findings
from tamis.run.checks.machine import MACHINE_CHECKS, Subject
from tamis.run.files.hardware import Gpu, read_gpus

CHECK_DATA = (
    "import sys; from tamis.config import load_config; from tamis.data.check import check; "
    "sys.exit(check(load_config(sys.argv[1]), 2, show_text=False))"
)
FAILED = "FAILED: "  # how a child begins the line that says why
CHILD_TIMEOUT_S = {"collectives": 120, "data": 180, "selfcheck": 600}


def check(
    config: Config,
    *,
    gpus: Sequence[Gpu] | None = None,
    quick: bool = False,
    emit: Callable[[str], None] = print,
) -> int:
    """Run every check, say each result as it comes, store them in OUT/preflight.json. 0: ready; 1: not.

    `quick` leaves out the three that start torch or reach for the data.
    """
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch:
        config_file = Path(scratch) / "config.yaml"
        config_file.write_text(config.to_yaml(), encoding="utf-8")
        subject = Subject(config, config_file, read_gpus() if gpus is None else gpus)
        for finding in _all_findings(subject, quick, emit):
            findings.append(finding)
            emit(_line(len(findings), finding))
    emit(f"preflight: {verdict(findings)}")
    with suppress(OSError):  # a directory that cannot be written was named above
        write_findings(subject.out_dir / "preflight", "Preflight", findings, config_hash=config.hash)
    return 0 if is_go(findings) else 1


def _all_findings(subject: Subject, quick: bool, emit: Callable[[str], None]) -> Iterator[Finding]:
    yield from (criterion.apply(subject) for criterion in MACHINE_CHECKS)
    if quick:
        return
    for criterion in CHILD_CHECKS:
        emit(f"    trying: {criterion.name} …")
        yield criterion.apply(subject)
    emit("    trying: kernels, causality and the random-token floor on this device …")
    yield from selfcheck(subject)


def collectives_work(subject: Subject) -> Finding:
    processes = len(subject.gpus)
    if processes < 2:
        return not_measured("fewer than two GPUs: nothing to connect")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return _judged_child([*torchrun, "-m", "tamis.train.tools.collective_check"], "collectives")


def data_is_reachable(subject: Subject) -> Finding:
    return _judged_child([sys.executable, "-c", CHECK_DATA, str(subject.config_file)], "data")


def selfcheck(subject: Subject) -> list[Finding]:
    """Kernels against the reference, causality and the random-token floor, on the device that will train."""
    command = [sys.executable, "-m", "tamis.train.tools.selfcheck", "--config", str(subject.config_file), "--json"]
    answer = _child(command, "selfcheck")
    if isinstance(answer, str):
        return [Finding("fail", answer, name="self-check of the model", remedy=SELFCHECK_REMEDY)]
    try:
        results = _results(answer.stdout)
        findings = [_selfcheck_finding(result) for result in results]
    except (ValueError, KeyError, TypeError, IndexError):
        return [Finding("fail", _last_line(answer), name="self-check of the model", remedy=SELFCHECK_REMEDY)]
    if not any(finding.name.startswith("attention") for finding in findings):
        findings.insert(0, Finding("not measured", "no kernels here: the reference itself computes", name=KERNELS))
    if answer.returncode and is_go(findings):
        findings.append(failed(f"the self-check ended with exit code {answer.returncode}", SELFCHECK_REMEDY))
    return findings


KERNELS = "attention kernels agree with the reference"
SELFCHECK_REMEDY = "do not train: run python -m tamis.train.tools.selfcheck alone, and report its output with env.json"
CHILD_CHECKS = (
    Criterion(
        "collectives across the GPUs",
        collectives_work,
        "set NCCL_P2P_DISABLE=1 and NCCL_DEBUG=INFO, then look which pair of GPUs fails",
    ),
    Criterion(
        "data can be read",
        data_is_reachable,
        "check the network and HF_DATASETS_CACHE, or set data.dataset: fineweb_edu_local with data.local_path",
    ),
)


def _judged_child(command: list[str], name: str) -> Finding:
    """By the exit code; the child's last line is the evidence."""
    answer = _child(command, name)
    if isinstance(answer, str):
        return failed(answer)
    return judged(answer.returncode == 0, _last_line(answer))


def _child(command: list[str], name: str) -> subprocess.CompletedProcess[str] | str:
    """The finished child, or the sentence that says why it did not finish."""
    limit = CHILD_TIMEOUT_S[name]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit} s from {' '.join(command[1:4])}"


def _results(stdout: str) -> list[dict[str, Any]]:
    """The list of results in the JSON document; lines that libraries print before it do not matter."""
    document = json.loads(stdout[min(i for i in (stdout.find("{"), stdout.find("[")) if i >= 0) :])
    results = document["checks"] if isinstance(document, dict) else document
    if not results:
        raise ValueError("no results")
    return list(results)


def _selfcheck_finding(result: dict[str, Any]) -> Finding:
    evidence = f"measured {float(result['measured']):.4g}, limit {float(result['limit']):.4g}"
    evidence += f" ({result['detail']})" if result.get("detail") else ""
    status, remedy = ("pass", "") if result["passed"] is True else ("fail", SELFCHECK_REMEDY)
    return Finding(status, evidence, name=str(result["name"]), remedy=remedy)  # type: ignore[arg-type]


def _line(number: int, finding: Finding) -> str:
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{number:2d}. {finding.status.upper():12s} {finding.name}: {finding.evidence}{remedy}"


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    """What the child said last: its result or its reason on stdout, else how it ended and its last words of trouble."""
    said, trouble = answer.stdout.strip().splitlines()[-1:], answer.stderr.strip().splitlines()[-1:]
    if said and (answer.returncode == 0 or said[0].startswith(FAILED)):
        return said[0].removeprefix(FAILED)
    return f"it ended with exit code {answer.returncode}: {(trouble or said or ['without a word'])[0]}"
