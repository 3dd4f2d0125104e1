"""`tamis handoff RUN`: one tar with everything a successor needs, every file listed with its sha256, without secrets.

Only files named here go in. All text is redacted, the checkpoint is verified before it is packed, and the finished
bundle is read back and verified.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from pickletools import genops

from tamis.run.checks.evidence import Evidence, launch_folders, read_evidence
from tamis.run.checks.findings import Finding, write_findings
from tamis.run.checks.runbooks import judge_runbooks, summary
from tamis.run.file_problems import file_problems
from tamis.run.files.console import announced, counted, print_line, printable_line
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import previous_file
from tamis.run.files.info import altered_files
from tamis.run.files.lock import ProcessId
from tamis.run.files.manifest import latest_valid_checkpoint, sha256_of
from tamis.run.files.reading import read_text
from tamis.run.files.records import errors_naming, utc, write_text_atomic
from tamis.run.handover.redaction import Redact, redactor
from tamis.run.handover.report import report_page
from tamis.run.locate import existing_run
from tamis.run.supervise.usage import usage_csv

WEIGHTS = "weights.safetensors"
SUMS = "SHA256SUMS"
SCRATCH = ".handoff_"
CONVERT_TIMEOUT_S = 600
MOST_TEXT_BYTES = 512 << 20
VERDICTS = ("go_no_go", "preflight")

Say = Callable[[str], None]


def write_bundle(
    run_dir: str | Path,
    *,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
    repository: Path | None = None,
    say: Say = print_line,
) -> int:
    """Write and verify the bundle. Returns 0 if it is complete and verified, 1 if something is missing.

    `output` defaults to a file next to the run directory, with the time in its name. Raises NoSuchRun.
    """
    directory = existing_run(run_dir)
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    output = output or directory.path.parent / f"{directory.path.resolve().name}_handoff_{stamp}.tar"
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_scratch(output.parent)
    prefix = f"{SCRATCH}{os.getpid()}_"
    environment = os.environ if environment is None else environment
    with announced(f"collecting, judging and packing {directory.path}") as tell:
        with errors_naming(output):
            scratch_folder = tempfile.TemporaryDirectory(dir=output.parent, prefix=prefix)
        with scratch_folder as scratch:  # a rename moves the bundle to output
            folder = Path(scratch) / output.stem
            folder.mkdir()
            missing = collect(directory, folder, environment, repository, say)
            tell("packing")
            pack(folder, output)
        tell("verifying")
        problems = verify_bundle(output)
        write_text_atomic(output.with_name(output.name + ".sha256"), f"{sha256_of(output)}  {output.name}\n")
    state = "damaged" if problems else "incomplete" if missing else "complete and verified"
    say(f"bundle: {output} ({output.stat().st_size / 1e6:,.1f} MB), {state}")
    for line in [*missing, *problems]:
        say(f"  {printable_line(line)}")
    return 1 if missing or problems else 0


def remove_abandoned_scratch(folder: Path) -> None:
    """Remove the scratch folders of handoffs that were killed; those of living processes stay."""
    for path in folder.glob(f"{SCRATCH}*"):
        pid = path.name.removeprefix(SCRATCH).partition("_")[0]
        if pid.isdecimal() and not path.is_symlink() and not ProcessId.of(int(pid)).is_alive():
            shutil.rmtree(path, ignore_errors=True)


def collect(
    directory: RunDirectory, folder: Path, environment: Mapping[str, str], repository: Path | None, say: Say
) -> list[str]:
    """Fill the folder; returns a sentence for each required thing that this run does not have."""
    evidence = read_evidence(directory)
    repository = repository or Path.cwd()
    redact = redactor(environment)
    missing: list[str] = []
    for source, target in text_files(evidence, repository).items():
        try:
            copy_redacted(source, folder / redact(target), redact)
        except FileNotFoundError:
            missing += [f"missing: {target}, the run did not write it"] if target in required_files(evidence) else []
        except OSError as error:
            missing.append(f"missing: {target}: {error}")
    missing += [f"unreadable file: {problem}" for problem in file_problems(directory)]
    missing += _add_checkpoint(directory, folder, redact, environment, say)
    results = judge_runbooks(evidence)
    every = [finding for findings in results.values() for finding in findings]
    title = f"Success criteria, run of {evidence.span}"
    say(summary(every))
    write_findings(folder / "criteria", title, [_redacted_finding(f, redact) for f in every])
    write_text_atomic(folder / "report.html", report_page(evidence, results, redact))
    write_text_atomic(folder / "README.txt", redact(_readme(evidence, summary(every), missing)))
    write_sums(folder)
    return missing


def required_files(evidence: Evidence) -> list[str]:
    """Files that a complete bundle has; training.csv only where the config asked for it."""
    names = ["run.info", "config.yaml", "env.json", "metrics.json", "events.jsonl"]
    return names if evidence.config and not evidence.config.train.csv else [*names, "training.csv"]


def text_files(evidence: Evidence, repository: Path) -> dict[Path, str]:
    """The allow-list: each file's path and its name in the bundle."""
    run = evidence.directory
    plain = [run.run_info, run.config_yaml, run.env_json, run.metrics_json, run.training_csv, run.val_csv, run.events]
    plain += [usage_csv(run), run.anomaly, run.eval_json, run.samples]
    plain += [run.path / f"{stem}.{suffix}" for stem in VERDICTS for suffix in ("json", "txt")]
    plain += [file for path in run.heartbeats().values() for file in (previous_file(path), path)]
    files = {path: path.name for path in plain}
    files |= {path: f"logs/{path.parent.name}/{path.name}" for path in evidence.logs}
    files |= {folder / "run.info": f"logs/{folder.name}/run.info" for folder in launch_folders(evidence.info)}
    altered = (line.removesuffix(" differs from the commit") for line in altered_files(repository))
    return files | {repository / name: f"altered/{name}" for name in altered}


def copy_redacted(source: Path, target: Path, redact: Redact) -> None:
    text = redact(read_text(source, MOST_TEXT_BYTES))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode())


def pack(folder: Path, output: Path) -> None:
    """Write an uncompressed tar (weights do not compress) and move it into place when it is complete."""
    temporary = folder.with_name("packed.tar.tmp")  # in the scratch folder, whose name cannot be predicted
    with tarfile.open(temporary, "w") as bundle:
        bundle.add(folder, arcname=folder.name, filter=_anonymous)
    temporary.replace(output)


def write_sums(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def verify_bundle(path: Path) -> list[str]:
    """Read the bundle back; returns a sentence for each file that differs from its sum."""
    with tarfile.open(path) as bundle:
        members = {member.name.partition("/")[2]: member for member in bundle if member.isfile()}
        found = {name: _sum_of(bundle, member) for name, member in members.items() if name != SUMS}
        listed = _read_sums(bundle, members.get(SUMS))
    wrong = [f"damaged: {name}" for name, digest in listed.items() if found.get(name) != digest]
    return wrong + [f"not listed in {SUMS}: {name}" for name in found if name not in listed]


def _add_checkpoint(
    directory: RunDirectory, folder: Path, redact: Redact, environment: Mapping[str, str], say: Say
) -> list[str]:
    """Add the newest valid checkpoint and its weights; a copy without the secrets when its configuration holds some."""
    step = latest_valid_checkpoint(directory, on_damaged=say)
    if step is None:
        return ["missing: a checkpoint, there is no valid one"]
    checkpoint = directory.checkpoint(step)
    packed = folder / checkpoint.name
    text = checkpoint_text(checkpoint)
    if redact(text) != text:
        kind = "folder" if checkpoint.is_dir() else "file"
        if problem := _convert(checkpoint, packed, kind, environment, "--redact"):
            return [f"missing: {packed.name}, its configuration holds a secret that could not be removed: {problem}"]
    else:
        for path in (checkpoint, directory.manifest(step)):
            _link(path, folder / path.name)
    problem = _write_weights(packed, folder / WEIGHTS)
    return [f"missing: {WEIGHTS}, {problem}"] if problem else []


def checkpoint_text(checkpoint: Path) -> str:
    """The strings of a checkpoint, its configuration's among them; bytes between them may look like a secret."""
    if checkpoint.is_dir():
        return read_text(checkpoint / "facts.json")
    if not zipfile.is_zipfile(checkpoint):
        return ""
    with zipfile.ZipFile(checkpoint) as archive:
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    try:
        return "\n".join(string for data in pickles for _, string, _ in genops(data) if isinstance(string, str))
    except ValueError:  # not a pickle that anything would load
        return "".join(data.decode(errors="replace") for data in pickles)


def _link(source: Path, target: Path) -> None:
    """Hard-link instead of copying gigabytes; the link survives when retention removes the original."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link_file)
    else:
        _link_file(source, target)


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _write_weights(checkpoint: Path, target: Path) -> str | None:
    """Write the weights alone; returns the reason when that fails."""
    return _convert(checkpoint, target, "safetensors", os.environ)


def _convert(checkpoint: Path, target: Path, kind: str, environment: Mapping[str, str], *options: str) -> str | None:
    """Run `tamis convert` in a child process, because it needs torch; returns the reason when that fails."""
    command = [sys.executable, "-m", "tamis", "convert", str(checkpoint), str(target), "--kind", kind, *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return f"not written within {CONVERT_TIMEOUT_S} s"
    if done.returncode == 0 and target.exists():
        return None
    return (done.stderr.strip().splitlines() or ["the conversion gave no reason"])[-1][:300]


def _redacted_finding(finding: Finding, redact: Redact) -> Finding:
    return replace(finding, name=redact(finding.name), evidence=redact(finding.evidence), remedy=redact(finding.remedy))


def _readme(evidence: Evidence, outcome: str, missing: list[str]) -> str:
    info = evidence.info
    lines = [
        f"Handoff of {info.get('model', evidence.directory.path.name)}, written {utc(time.time())}",
        f"Run: {evidence.span}, {counted(evidence.last_step, 'step')}; success criteria: {outcome}",
        "",
        "report.html       curves, criteria, facts; open it in any browser, it needs no network",
        "run.info          machine, config, launch command, commit",
        "config.yaml       the configuration as it ran; env.json: versions, GPUs, settings",
        "training.csv      step,loss,lr,toks_per_s; val.csv: step,loss,ppl; metrics.json: final figures",
        "eval.json         accuracy on tasks, if measured; samples.jsonl: how the model continued held-out text",
        "criteria.txt      success criteria with their evidence; go_no_go.txt: the phases of the launch",
        "events.jsonl      every decision of the supervisor; heartbeat_rank*.jsonl: every step of every rank",
        "logs/             output of each launch; altered/: configs and scripts that differ from the commit",
        "checkpoint_step*  the newest valid checkpoint and its manifest: tamis train config.yaml --resume FILE",
        f"{WEIGHTS}  the weights alone",
        f"{SUMS}        check with: sha256sum -c {SUMS}",
    ]
    lines += ["", "Not in this bundle:", *missing] if missing else []
    return "\n".join(lines) + "\n"


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove user and group names of this machine."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _sum_of(bundle: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file, digest = bundle.extractfile(member), hashlib.sha256()
    while file and (block := file.read(1 << 20)):
        digest.update(block)
    return digest.hexdigest()


def _read_sums(bundle: tarfile.TarFile, member: tarfile.TarInfo | None) -> dict[str, str]:
    """File name → sha256."""
    file = bundle.extractfile(member) if member else None
    lines = file.read().decode().splitlines() if file else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
