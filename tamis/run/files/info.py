"""run.info: what is about to run, on what, from which config and commit; written and printed before step 1.

It is YAML, so a person and a program read the same file.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tamis.config import Config, ConfigError, load_config
from tamis.config.addresses import HIDDEN
from tamis.config.size import parameter_count
from tamis.config.yaml_file import read_value, write_value
from tamis.run.files.environment import cuda_of_torch, package_versions
from tamis.run.files.hardware import Gpu
from tamis.run.files.reading import read_text
from tamis.run.files.records import utc, write_text_atomic

NUMBERS = ("parameters", "gpu_count", "processes", "steps", "tokens_per_step", "tokens_planned", "estimate_toks_per_s")
ETA_UNKNOWN = "unknown until measured"
SENT_COMMIT = ".commit"
WATCHED_FOLDERS = ("configs", "scripts")  # an operator who edits these mid-way must find it in run.info


def describe_run(
    config: Config,
    *,
    config_path: str | Path,
    run_dir: Path,
    gpus: Sequence[Gpu],
    processes: int,
    command: Sequence[str],
    worker_command: Sequence[str] = (),
    estimate_toks_per_s: float | None = None,  # of this very config on this machine, measured by a short probe
    repository: Path | None = None,
) -> dict[str, Any]:
    """All fields of run.info. The ETA stays unknown here: nothing has been measured yet."""
    repository = repository or Path.cwd()
    tokens_per_step = config.tokens_per_step(processes)
    return {
        "written": utc(),
        "run_dir": str(run_dir),
        "out_dir": config.train.out_dir,
        "config": str(config_path),
        "config_hash": config.hash,
        "config_changes": changes_from_file(config, config_path) + altered_files(repository),
        "model": config.model.name,
        "attention": config.model.attention,
        "parameters": parameter_count(config),
        "dataset": config.data.dataset,
        "tokenizer": config.data.tokenizer,
        "precision": config.runtime.precision,
        "gpu_count": len(gpus),
        "gpus": [_gpu_line(gpu) for gpu in gpus],
        "driver": gpus[0].driver if gpus else None,
        "torch": package_versions()["torch"],
        "cuda_of_torch": cuda_of_torch(),
        "processes": processes,
        "launch_command": shlex.join(_without_addresses(command)),
        "worker_command": shlex.join(worker_command),
        "git_commit": git_commit(repository),
        "steps": config.train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens_planned": tokens_per_step * config.train.steps,
        "estimate_toks_per_s": estimate_toks_per_s,
        "eta": ETA_UNKNOWN,
    }


def _gpu_line(gpu: Gpu) -> str:
    return ", ".join(filter(None, (gpu.name, f"{gpu.total_mib} MiB", gpu.speed.slowed_or_limited)))


def _without_addresses(command: Sequence[str]) -> list[str]:
    """The command line without the addresses in it: one may hold a password, or the name of a user and a host."""
    shown = []
    for before, word in zip(["", *command], command, strict=False):
        key, equals, _ = word.partition("=")
        is_set = equals and key.strip() in ("notify.to", "copy.to", "--from")
        shown.append(f"{key}={HIDDEN}" if is_set else HIDDEN if before == "--from" else word)
    return shown


def write_info(path: Path, info: dict[str, Any]) -> None:
    write_text_atomic(path, write_value(info))


def read_info(path: Path) -> dict[str, Any]:
    """The fields of a run.info that have the type they are written with; none when it cannot be read."""
    try:
        info = parse_info(read_text(path))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in info.items() if _has_its_type(key, value)}


@lru_cache(maxsize=32)  # the monitor reads the same text every two seconds, and YAML is slow
def parse_info(text: str) -> Mapping[str, Any]:
    """All fields; a ValueError when the text is no YAML mapping."""
    try:
        info = read_value(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError("run.info is not valid YAML") from None
    if not isinstance(info, dict):
        raise ValueError("run.info is not a YAML mapping")
    return info


def _has_its_type(key: object, value: object) -> bool:
    if key in NUMBERS:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18)
    is_flat = not isinstance(value, dict | list) or (
        isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    )
    return isinstance(key, str) and is_flat


def write_eta(path: Path, eta: str) -> None:
    """Replace the ETA once tokens have been measured."""
    if info := read_info(path):
        write_info(path, info | {"eta": eta})


def changes_from_file(config: Config, config_path: str | Path) -> list[str]:
    """Every key whose value is not the file's: set by flag, variable or override. The address of copies is left out."""
    try:
        original = load_config(config_path).model_dump()
    except ConfigError as error:
        return [f"{config_path} cannot be compared: {error}"]
    return [
        f"{section}.{key}: {original[section][key]} → {value}"
        for section, keys in config.model_dump().items()
        for key, value in keys.items()
        if original[section][key] != value and section != "copy"
    ]


def altered_files(repository: Path) -> list[str]:
    """Config and script files that differ from the commit."""
    status = _git(repository, "status", "--porcelain", "--", *WATCHED_FOLDERS)
    return [f"{line[3:]} differs from the commit" for line in (status or "").splitlines()]


def git_commit(repository: Path) -> str:
    """The commit of a checkout, or of the one that `tamis remote` sent here."""
    commit = (_git(repository, "rev-parse", "HEAD") or "").strip()
    if not commit:
        with suppress(OSError):
            commit = read_text(repository / SENT_COMMIT, most=200).strip()
    return commit or "unknown: not a git checkout"


def measured_commit(repository: Path) -> str:
    """The commit, followed by `-dirty` where files of the package differ from it; never so without git."""
    changed = _git(repository, "status", "--porcelain", "--", "tamis")
    return f"{git_commit(repository)}-dirty" if changed else git_commit(repository)


def _git(repository: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
