"""Which checkpoint may be trusted: its manifest and verification, the newest valid one, retention. No torch.

The order of a save is: OUT/checkpoint_step{N}.pt whole and in place, then OUT/checkpoint_step{N}.json. A checkpoint
without manifest was cut short; one whose bytes disagree with its manifest is damaged. Neither is ever loaded.
A checkpoint that many processes wrote together is a folder of that name; everything here holds for it too.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tamis.run.files.console import print_line
from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import open_to_read, read_json
from tamis.run.files.records import utc, write_json_atomic

FIELDS = {"step": int, "bytes": int, "sha256": str}
SETTLED_S = 2.0  # a file changed more recently could change again without a change of its times

Stamp = tuple[tuple[int, int, int, int], ...]
_summed: dict[Path, tuple[Stamp, str]] = {}


class DamagedCheckpoint(ValueError):
    """A checkpoint that must not be loaded; the message gives the reason and the one to use instead."""


def write_manifest(
    run: RunDirectory, step: int, *, config_hash: str, sha256: str | None = None, size: int | None = None
) -> None:
    """Declare a finished checkpoint. A writer that summed its bytes passes the sum; otherwise the file is read."""
    run.require_held()
    path = run.checkpoint(step)
    manifest = {
        "step": step,
        "file": path.name,
        "bytes": size_of(path) if size is None else size,
        "sha256": sha256 or sha256_of(path),
        "config_hash": config_hash,
        "time": utc(),
    }
    write_json_atomic(run.manifest(step), manifest)


def sha256_of(path: str | Path) -> str:
    """Of a file's bytes; of a folder, that of the names and sums of its files."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        listing = "".join(f"{sha256_of(file)} {file.name}\n" for file in sorted(path.iterdir()))
        return hashlib.sha256(listing.encode()).hexdigest()
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def size_of(path: Path) -> int:
    """In bytes, of a file or of all files in a folder."""
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(file) for file in path.iterdir())
    with open_to_read(path) as file:
        return os.fstat(file.fileno()).st_size


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest's fields; a ValueError names what is wrong with it."""
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        raise ValueError("it has no manifest: the save was cut short") from None
    except OSError as error:
        raise ValueError(f"its manifest cannot be read: {error}") from None
    except ValueError:
        manifest = None
    if isinstance(manifest, dict) and all(type(manifest.get(key)) is kind for key, kind in FIELDS.items()):
        return manifest | {"time": str(manifest.get("time", ""))}
    raise ValueError(f"its manifest {Path(path).name} cannot be read")


def damage(manifest: str | Path) -> str | None:
    """What is wrong with the checkpoint of this manifest, in a few words; None when every byte is as it was written."""
    manifest = Path(manifest)
    checkpoint = manifest.with_suffix(".pt")
    try:
        promised = read_manifest(manifest)
        size = size_of(checkpoint)
        if size != promised["bytes"]:
            return f"it holds {size} bytes, {promised['bytes']} were written"
        if _sum_of(checkpoint, _stamp(checkpoint)) != promised["sha256"]:
            return "its sha256 is not the one that was written"
    except FileNotFoundError:
        return "the file is gone, only its manifest is left"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _sum_of(path: Path, stamp: Stamp) -> str:
    """The sha256; not computed again in this process while the stamp stays as it was."""
    if path in _summed and _summed[path][0] == stamp:
        return _summed[path][1]
    found = sha256_of(path)
    if time.time() - max((changed for *_, changed in stamp), default=0) / 1e9 > SETTLED_S:
        _summed[path] = stamp, found
    return found


def _stamp(path: Path) -> Stamp:
    """Identity, size and times of the file, or of every file in a folder: they change with the bytes."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in (file.stat() for file in files))


def require_valid(checkpoint: str | Path) -> None:
    """Raise DamagedCheckpoint unless every byte of `checkpoint_step{N}.pt` is as it was written."""
    checkpoint = Path(checkpoint)
    problem = damage(checkpoint.with_suffix(".json")) if checkpoint.exists() else "there is no such file"
    if problem is not None:
        newest = latest_valid_checkpoint(checkpoint.parent, on_damaged=lambda message: None)
        remedy = "start without it" if newest is None else f"resume from checkpoint_step{newest}.pt"
        raise DamagedCheckpoint(f"checkpoint {checkpoint} cannot be used: {problem}; {remedy}")


def latest_valid_checkpoint(
    run: RunDirectory | str | Path, *, on_damaged: Callable[[str], None] | None = None
) -> int | None:
    """The newest step whose checkpoint is whole; newer ones that are not are named to `on_damaged`, else on stderr."""
    run = run if isinstance(run, RunDirectory) else RunDirectory(run)
    tell = on_damaged or (lambda message: print_line(message, sys.stderr))
    for step in reversed(run.checkpoint_traces()):
        problem = damage(run.manifest(step))
        if problem is None:
            return step
        tell(f"{run.checkpoint(step)} is not used: {problem}")
    return None


def checkpoint_to_resume(run: RunDirectory, *, on_damaged: Callable[[str], None] | None = None) -> int | None:
    """The newest valid step; None when there is no checkpoint, or only the first save, which a kill cut short.

    Raises DamagedCheckpoint when there are checkpoints and none of them is valid: a run never starts over by itself.
    """
    problems: list[str] = []
    step = latest_valid_checkpoint(run, on_damaged=problems.append)
    if step is None and problems and not _was_first_save_cut_short(run):
        folder = shlex.quote(str(run.path))
        raise DamagedCheckpoint(
            f"no checkpoint in {run.path} can be used: {'; '.join(problems)}. Training does not start over by itself: "
            f"restore one of them with its manifest. To start over on purpose, move them away (mkdir {folder}/damaged "
            f"&& mv {folder}/checkpoint_step* {folder}/damaged/) or name another train.out_dir"
        )
    for problem in problems if on_damaged else []:
        on_damaged(problem)  # type: ignore[misc]
    return step


def _was_first_save_cut_short(run: RunDirectory) -> bool:
    """True if one checkpoint without a manifest is all there is. A kill leaves one; several lost their manifests."""
    steps = run.checkpoint_traces()
    return len(steps) == 1 and not run.manifest(steps[0]).exists()


def newest_or_itself(path: str | Path) -> Path:
    """The newest valid checkpoint of a run's directory; anything else as it was given."""
    step = latest_valid_checkpoint(path) if Path(path).is_dir() else None
    return Path(path) if step is None else RunDirectory(path).checkpoint(step)


def retire(run: RunDirectory, keep: int) -> list[int]:
    """Delete all but the newest `keep` finished checkpoints, and what older cut-short saves left; 0 keeps all.

    The manifest goes first, so that a kill in between leaves an unfinished checkpoint, not a damaged one.
    """
    run.require_held()
    finished = [step for step in run.checkpoints() if _has_promised_size(run, step)]
    if keep == 0 or len(finished) <= keep:
        return []
    oldest_kept = finished[-keep]
    removed = [step for step in run.checkpoint_traces() if step < oldest_kept]
    for step in removed:
        run.manifest(step).unlink(missing_ok=True)
        remove(run.checkpoint(step))
    return removed


def remove_leftovers(run: RunDirectory) -> None:
    """Delete the temporary files of saves that were killed; only for the owner of the run, before it saves."""
    for path in run.checkpoint_leftovers():
        remove(path)


def remove_scratch(run: RunDirectory) -> None:
    """Delete the scratch files of processes that were killed; only for the owner of the run, before it starts one."""
    for path, pid in run.scratch_files().items():
        if not Path(f"/proc/{pid}").exists():
            remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder; one that is not there is fine."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _has_promised_size(run: RunDirectory, step: int) -> bool:
    """Reading every byte at each save would be slow; the size catches what a full disk or a kill leaves."""
    try:
        return size_of(run.checkpoint(step)) == read_manifest(run.manifest(step))["bytes"]
    except (OSError, ValueError):
        return False


def copy_latest(run: RunDirectory | str | Path, target: str | Path) -> Path:
    """Copy the newest valid checkpoint and its manifest to `target`; returns where it came from."""
    run = run if isinstance(run, RunDirectory) else RunDirectory(run)
    step = latest_valid_checkpoint(run)
    if step is None:
        raise DamagedCheckpoint(f"there is no valid checkpoint in {run.path} to copy to {target}")
    target, source = Path(target), run.checkpoint(step)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)
    shutil.copyfile(run.manifest(step), target.with_suffix(".json"))
    return source
