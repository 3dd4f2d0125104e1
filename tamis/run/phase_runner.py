"""`tamis launch --phases`: runs the phases in order, each in its own directory, and judges what each left there.

A phase that fails stops the launch with the reason and what to try. A phase that passed before, with the same config,
commit, GPUs and step count, is not run again unless asked for.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from tamis.config import Config, build_config
from tamis.run.checks.evidence import read_evidence
from tamis.run.checks.findings import Finding, findings_text, is_go, print_findings, utc, verdict
from tamis.run.files.directory import RunDirectory
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.hardware import Gpu
from tamis.run.files.info import describe_run, git_commit, write_info
from tamis.run.files.records import write_json_atomic, write_text_atomic
from tamis.run.phases import PHASES, Phase
from tamis.run.supervise.workers import trainer_command

Launch = Callable[[Config], int]  # runs a config under supervision to its end; returns the exit code
STOPPED_BY_REQUEST = (ExitCode.HALTED, ExitCode.PREEMPTED)
PRODUCTION = PHASES[-1].number


@dataclass(frozen=True)
class Setting:
    """What all phases of one launch share."""

    config: Config
    config_path: str
    gpus: Sequence[Gpu]
    processes: int
    estimate_toks_per_s: float | None
    steps: Mapping[int, int]  # step counts that replace a phase's own

    def key(self, phase: Phase) -> str:
        """Changes with anything that could change the outcome of a phase."""
        machine = [f"{gpu.name} {gpu.total_mib}" for gpu in self.gpus]
        parts = [self.config.hash, git_commit(Path.cwd()), machine, self.processes, phase.number, self._steps(phase)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def config_of(self, phase: Phase, out_dir: Path) -> Config:
        tree = self.config.model_dump()
        tree["train"]["steps"] = self._steps(phase)
        tree["train"]["warmup_steps"] = min(tree["train"]["warmup_steps"], tree["train"]["steps"])
        tree["train"]["out_dir"] = str(out_dir)
        if phase.dataset:
            tree["data"]["dataset"] = phase.dataset
            tree["runtime"]["production"] = False  # a synthetic step is a test, whatever the run after it is
        return build_config(tree)

    def _steps(self, phase: Phase) -> int:
        return self.steps.get(phase.number, phase.steps or self.config.train.steps)


def launch_by_phases(
    config: Config,
    launch: Launch,
    *,
    config_path: str,
    gpus: Sequence[Gpu],
    processes: int,
    estimate_toks_per_s: float | None = None,
    steps: Mapping[int, int] | None = None,
    repeat: bool = False,
    console: Console | None = None,
) -> int:
    """Run the phases in order; the exit code of the first that does not pass, or that of production."""
    console = console or Console()
    setting = Setting(config, config_path, gpus, processes, estimate_toks_per_s, steps or {})
    out = RunDirectory(config.train.out_dir).create()
    for phase in PHASES:
        before = None if repeat or phase.number == PRODUCTION else _passed_before(out, setting.key(phase))
        if before:
            console.print(
                f"phase {phase.number} ({phase.title}) passed at {before['judged_at']}, unchanged since", soft_wrap=True
            )
            continue
        code = run_phase(phase, setting, launch, console)
        if code:
            return code
    return ExitCode.DONE


def run_phase(phase: Phase, setting: Setting, launch: Launch, console: Console) -> int:
    """Run and judge one phase; 0 only if it ended well and its verdict is GO."""
    directory = _phase_directory(setting.config, phase).create()
    config = setting.config_of(phase, directory.path)
    console.print(
        f"phase {phase.number}: {phase.title}, {config.train.steps} steps in {directory.path}",
        markup=False,
        soft_wrap=True,
    )
    write_info(directory.run_info, _info(setting, config, directory))
    code = launch(config)
    if code in STOPPED_BY_REQUEST:
        console.print(f"phase {phase.number} was stopped on request; launch again to go on", soft_wrap=True)
        return code
    evidence = replace(read_evidence(directory), config=config)
    findings = [_ended(code), *(criterion.apply(evidence) for criterion in phase.criteria)]
    print_findings(f"Phase {phase.number}: {phase.title}", findings, console)
    _store(RunDirectory(setting.config.train.out_dir), phase, setting.key(phase), directory, findings)
    return ExitCode.DONE if is_go(findings) else code or ExitCode.CRASH


def read_go_no_go(out: RunDirectory) -> list[dict[str, Any]]:
    """The records of all phases run here, oldest first."""
    try:
        return list(json.loads(_stem(out).with_suffix(".json").read_text(encoding="utf-8"))["phases"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _phase_directory(config: Config, phase: Phase) -> RunDirectory:
    """Production runs in out_dir itself; each rehearsal in a directory of its own, so that nothing is ever resumed."""
    out = Path(config.train.out_dir)
    if phase.number == PRODUCTION:
        return RunDirectory(out)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return RunDirectory(out / "phases" / f"phase{phase.number}_{stamp}_{time.time_ns() % 1000:03d}")


def _info(setting: Setting, config: Config, directory: RunDirectory) -> dict[str, Any]:
    return describe_run(
        config,
        config_path=setting.config_path,
        run_dir=directory.path,
        gpus=setting.gpus,
        processes=setting.processes,
        command=trainer_command(directory.config_yaml, setting.processes, None),
        estimate_toks_per_s=setting.estimate_toks_per_s,
    )


def _ended(code: int) -> Finding:
    names = {known.value: known.name.lower() for known in ExitCode}
    status: Literal["pass", "fail"] = "pass" if code == ExitCode.DONE else "fail"
    remedy = "" if code == ExitCode.DONE else "read the end of train.log and events.jsonl"
    return Finding(
        status, f"exit code {code} ({names.get(code, 'crash')})", name="the workers ended well", remedy=remedy
    )


def _passed_before(out: RunDirectory, key: str) -> dict[str, Any] | None:
    records = [record for record in read_go_no_go(out) if record.get("key") == key]
    return records[-1] if records and records[-1].get("go") else None


def _store(out: RunDirectory, phase: Phase, key: str, directory: RunDirectory, findings: Sequence[Finding]) -> None:
    record = {
        "phase": phase.number,
        "title": phase.title,
        "directory": str(directory.path),
        "judged_at": utc(time.time()),
        "key": key,
        "go": is_go(findings),
        "verdict": verdict(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    records = [*read_go_no_go(out), record]
    write_json_atomic(_stem(out).with_suffix(".json"), {"phases": records})
    write_text_atomic(_stem(out).with_suffix(".txt"), "\n".join(map(_record_text, records)))


def _record_text(record: dict[str, Any]) -> str:
    title = f"Phase {record['phase']}: {record['title']}, judged {record['judged_at']}, in {record['directory']}"
    return findings_text(title, [Finding(**finding) for finding in record["findings"]])


def _stem(out: RunDirectory) -> Path:
    return out.path / "go_no_go"
