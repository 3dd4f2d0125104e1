"""The host's side of `pull`: list the files of a run with their sums, then send what the other side asks for.

One line of JSON goes out, one comes back with a name and an offset for each wanted file, then the bytes follow.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import latest_valid_checkpoint, read_manifest
from tamis.run.files.reading import open_to_read

CHOICES = ("newest", "all", "none")
BLOCK_BYTES = 1 << 20
SKIPPED_SUFFIXES = (".tmp", ".raw")


def listed_files(run: RunDirectory, checkpoints: str) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name → path and record. A checkpoint comes before its manifest, without which it counts as unfinished."""
    plain = [path for path in sorted(run.path.iterdir()) if _is_plain(path) and not path.name.startswith("checkpoint_")]
    files = {path.name: path for path in plain}
    files |= {f"tb/{path.name}": path for path in sorted(run.tensorboard.glob("*")) if _is_plain(path)}
    bundles = sorted(run.path.resolve().parent.glob(f"{run.path.resolve().name}_handoff_*.tar"))[-1:]
    files |= {path.name: path for bundle in bundles for path in (bundle, Path(f"{bundle}.sha256")) if _is_plain(path)}
    found = {name: (path, _record(name, path)) for name, path in files.items()}
    for step in chosen_steps(run, checkpoints):
        found |= _checkpoint_files(run, step)
    return found


def chosen_steps(run: RunDirectory, checkpoints: str) -> list[int]:
    """The steps whose checkpoints are sent: the newest valid one, all finished ones, or none."""
    if checkpoints == "all":
        return run.checkpoints()
    newest = latest_valid_checkpoint(run) if checkpoints == "newest" else None
    return [] if newest is None else [newest]


def _checkpoint_files(run: RunDirectory, step: int) -> dict[str, tuple[Path, dict[str, Any]]]:
    path, manifest = run.checkpoint(step), run.manifest(step)
    if path.is_dir():
        parts = {f"{path.name}/{part.name}": part for part in sorted(path.iterdir()) if part.is_file()}
        found = {name: (part, _record(name, part)) for name, part in parts.items()}
    else:
        record = {"name": path.name, "size": path.stat().st_size, "sha256": read_manifest(manifest)["sha256"]}
        found = {path.name: (path, record)}
    return found | {manifest.name: (manifest, _record(manifest.name, manifest))}


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.name[0] != "." and path.suffix not in SKIPPED_SUFFIXES


def _record(name: str, path: Path) -> dict[str, Any]:
    """The size now and the sum of that many bytes: a log may grow until it is sent."""
    digest, size = hashlib.sha256(), 0
    with open_to_read(path) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"name": name, "size": size, "sha256": digest.hexdigest()}


def _send_range(path: Path, offset: int, size: int) -> None:
    """Write the bytes from `offset` to `size`; a file that became shorter ends the connection."""
    left = size - offset
    with open_to_read(path) as file:
        file.seek(offset)
        while left > 0:
            block = file.read(min(left, BLOCK_BYTES))
            if not block:
                sys.exit(f"{path.name} became shorter while it was sent")
            sys.stdout.buffer.write(block)
            left -= len(block)
    sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tamis.remote.sender", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--checkpoints", choices=CHOICES, default="newest")
    arguments = parser.parse_args()
    run = RunDirectory(arguments.run)
    if not run.path.is_dir():
        sys.exit(f"there is no run {arguments.run}")
    files = listed_files(run, arguments.checkpoints)
    print(json.dumps([record for _, record in files.values()]), flush=True)
    for name, offset in json.loads(sys.stdin.readline() or "[]"):
        path, record = files[name]
        _send_range(path, offset, record["size"])


if __name__ == "__main__":
    main()
