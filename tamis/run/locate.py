"""Which run an operator means: the directory that was named, or an error that names the runs there are. Reads only."""

from __future__ import annotations

import difflib
from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.info import read_info

RUNS = Path("artifacts")  # where the shipped configs put theirs
SHOWN = 5


class NoSuchRun(ValueError):
    """The path that was given is no run's directory; the message names those that are."""


def existing_run(path: str | Path) -> RunDirectory:
    """The run in this directory."""
    directory = RunDirectory(path)
    if out_dir := _out_dir_of_launch(directory):
        raise NoSuchRun(f"{path} holds the logs of a launch; its run is in {out_dir}")
    if not holds_a_run(directory):
        raise NoSuchRun(no_run_in(path))
    return directory


def no_run_in(path: str | Path) -> str:
    """Return a sentence: what the path is instead, and the runs nearby."""
    path = Path(path)
    state = "holds no run" if path.is_dir() else _not_a_folder(path)
    return f"{path} {state}; give the directory that train.out_dir names ({_known_runs(path)})"


def require_folder(path: Path) -> None:
    """Raise unless this is a folder, or the one that the first run makes."""
    if not path.is_dir() and (path != RUNS or path.exists()):
        raise NoSuchRun(f"{path} {_not_a_folder(path)}; give a folder with runs in it ({_known_runs(path)})")


def _not_a_folder(path: Path) -> str:
    return "is not a directory" if path.exists() else "does not exist"


def _known_runs(path: Path) -> str:
    runs = runs_near(path)
    return f"runs here: {', '.join(map(str, runs))}" if runs else "there is no run here yet, tamis run starts one"


def existing_model(path: Path) -> Path:
    """The path of a model, as it is; another is refused with the checkpoints or runs nearby, before torch loads."""
    if path.is_dir() or (path.exists() and path.suffix in (".pt", ".safetensors")):
        return path
    state = "is no checkpoint" if path.exists() else "does not exist"
    if steps := RunDirectory(path.parent).checkpoints():
        raise NoSuchRun(f"{path} {state}; {path.parent} has checkpoints of steps {', '.join(map(str, steps))}")
    kinds = "a checkpoint, a run's directory, an exported folder or weights"
    raise NoSuchRun(f"{path} {state}; give {kinds} ({_known_runs(path)})")


def runs_near(path: Path) -> list[Path]:
    """Runs inside and around the path and under artifacts/, the most similar names first."""
    folders = [path.parent, *_folders(path), *_folders(path.parent), *_folders(RUNS)]
    runs = {str(folder): folder for folder in folders if folder != path and _is_run(RunDirectory(folder))}
    alike = difflib.get_close_matches(str(path), runs, n=SHOWN, cutoff=0.0)
    return [runs[name] for name in alike]


def runs_in(folder: Path) -> list[RunDirectory]:
    """The runs directly inside a folder, and the folder itself if it is one."""
    return [RunDirectory(path) for path in (folder, *_folders(folder)) if _is_run(RunDirectory(path))]


def last_written_run() -> Path:
    """The run under artifacts/ whose directory changed last."""
    runs = runs_in(RUNS)
    if not runs:
        raise NoSuchRun(f"there is no run in {RUNS}/: name a run's directory, or start one with tamis run")
    return max((run.path for run in runs), key=lambda path: path.stat().st_mtime)


def holds_a_run(directory: RunDirectory) -> bool:
    """True if any run file exists, even just the log of a failed start.

    `.lock` does not count: a folder of token shards has one too, and a launch leaves `.launch_lock` before it.
    """
    traces = [directory.config_yaml, directory.run_info, directory.training_csv, directory.events, directory.train_log]
    traces += [directory.launch_lock, directory.trainer_lock]
    traces += [directory.path / name for name in ("launch.log", "preflight.json")]
    return any(trace.exists() for trace in traces) or bool(directory.heartbeats() or directory.checkpoints())


def _is_run(directory: RunDirectory) -> bool:
    return holds_a_run(directory) and _out_dir_of_launch(directory) is None


def _out_dir_of_launch(directory: RunDirectory) -> str | None:
    """Where the run is, when this is only the folder of a launch's logs (artifacts/train_runs/…)."""
    info = read_info(directory.run_info)
    run_dir, out_dir = info.get("run_dir"), info.get("out_dir")
    is_launch = run_dir != out_dir and str(run_dir) == str(directory.path) and not directory.config_yaml.exists()
    return str(out_dir) if is_launch and out_dir else None


def _folders(path: Path) -> list[Path]:
    return sorted(path.glob("*/")) if path.is_dir() else []
