"""Every file name of a run directory, in one place: the interface between trainer, supervisor, watchdog and monitor.

`docs/run-directory.md` describes what each file holds.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint_step(\d+)\.(pt|json)")
_TEMPORARY = re.compile(r"checkpoint_step\d+\.(pt|json)(\.\d+)?\.tmp")
_SCRATCH = re.compile(r"\.(\d+)\.tmp$|^\.stacks_rank\d+_pid(\d+)\.raw$")
_HEARTBEAT = re.compile(r"heartbeat_rank(\d+)\.jsonl")


class DirectoryReplaced(RuntimeError):
    """The run directory was moved or deleted while a process used it. Not an OSError: no writer may ignore it."""


def new_folder(path: Path) -> Path:
    """Create a folder of this name; a number is added while the name is taken."""
    for folder in (path, *(path.with_name(f"{path.name}_{number}") for number in range(2, 1000))):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise FileExistsError(f"there is no free name like {path}")


class RunDirectory:
    """The names of the files under one OUT directory; nothing is created before `create()`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._held: int | None = None

    def create(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
            raise OSError(f"{self.path} cannot be a run's directory ({why}): choose another train.out_dir") from None
        return self

    def hold(self) -> None:
        """Remember this directory. The open descriptor keeps its inode from being reused after a delete."""
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_still_held(self) -> bool:
        """False if the path no longer leads to the directory that `hold` opened."""
        if self._held is None:
            return True
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._held))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # other errors may pass

    def require_held(self) -> None:
        """Raise DirectoryReplaced if the path no longer leads to the directory that `hold` opened."""
        if not self.is_still_held():
            raise DirectoryReplaced(
                f"{self.path} was moved or deleted while this run used it. The run ends here and writes nothing to a "
                f"new directory of that name; its checkpoints are where {self.path.name} was moved to"
            )

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def training_csv(self) -> Path:
        return self.path / "training.csv"

    @property
    def val_csv(self) -> Path:
        return self.path / "val.csv"

    @property
    def metrics_json(self) -> Path:
        return self.path / "metrics.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def eval_json(self) -> Path:
        return self.path / "eval.json"

    @property
    def env_json(self) -> Path:
        return self.path / "env.json"

    @property
    def run_info(self) -> Path:
        return self.path / "run.info"

    @property
    def train_log(self) -> Path:
        return self.path / "train.log"

    @property
    def live_html(self) -> Path:
        return self.path / "live.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def halt(self) -> Path:
        return self.path / ".HALT"

    @property
    def keep(self) -> Path:
        """Cancels cost.on_end."""
        return self.path / ".KEEP"

    @property
    def cost_json(self) -> Path:
        return self.path / "cost.json"

    @property
    def anomaly(self) -> Path:
        return self.path / ".anomaly_type"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the supervisor."""
        return self.path / ".lock"

    @property
    def launch_lock(self) -> Path:
        """Held while a launch checks or rehearses, by phases or a smoke test, which run in directories of their own."""
        return self.path / ".launch_lock"

    @property
    def trainer_lock(self) -> Path:
        """Held by rank 0 of the trainer, supervised or not: never two trainers in one directory."""
        return self.path / ".trainer_lock"

    @property
    def copies(self) -> Path:
        """What `copy.to` holds of this run, for the monitor."""
        return self.path / "copies.json"

    @property
    def copy_id(self) -> Path:
        """The name by which a store recognises this directory."""
        return self.path / ".copy_id"

    @property
    def copy_lock(self) -> Path:
        """Held by the process that copies."""
        return self.path / ".copy_lock"

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"heartbeat_rank{rank}.jsonl"

    def heartbeats(self) -> dict[int, Path]:
        """The heartbeat files that exist, by rank."""
        found = ((_HEARTBEAT.fullmatch(path.name), path) for path in self._entries())
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint_step{step}.pt"

    def manifest(self, step: int) -> Path:
        return self.path / f"checkpoint_step{step}.json"

    def checkpoints(self) -> list[int]:
        """Steps, ascending, whose checkpoint was finished: both the file and its manifest are there."""
        return sorted(self._steps_with("pt") & self._steps_with("json"))

    def checkpoint_traces(self) -> list[int]:
        """Steps, ascending, with a checkpoint file or a manifest, finished or not."""
        return sorted(self._steps_with("pt") | self._steps_with("json"))

    def checkpoint_leftovers(self) -> list[Path]:
        """Temporary files of saves that were cut short."""
        return sorted(path for path in self._entries() if _TEMPORARY.fullmatch(path.name))

    def scratch_files(self) -> dict[Path, int]:
        """Scratch files of atomic writes and stack dumps, with the pid of the process that made each."""
        found = ((path, _SCRATCH.search(path.name)) for path in self._entries())
        return {path: int(match[1] or match[2]) for path, match in found if match}

    def stackdumps(self) -> list[Path]:
        """Those written to their end."""
        return sorted(path for path in self._entries() if path.match("stackdump_*.txt"))

    def memory_dump(self, moment: str, step: int, suffix: str) -> Path:
        """`moment` is pre or post the step."""
        return self.path / f"mem_{moment}_step{step}.{suffix}"

    def _steps_with(self, suffix: str) -> set[int]:
        matches = (_CHECKPOINT.fullmatch(path.name) for path in self._entries())
        return {int(match[1]) for match in matches if match and match[2] == suffix}

    def _entries(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
