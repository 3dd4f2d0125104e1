"""`pull`: fetch a run's files to this machine, verified by checksum. An interrupted pull continues where it stopped.

A file arrives under NAME.part and gets its name once its sum is right. Names that the host sends are not trusted.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tamis.remote.connection import NOT_SET_UP, SSH_FAILED, Host, until_connected
from tamis.run.files.console import counted, say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import damage

MARK = ".pulled_from"  # which run on which host the folder belongs to, as a hash
BLOCK_BYTES = 1 << 20
REPORT_EVERY_BYTES = 256 << 20
MOST_LISTING_BYTES = 16 << 20
_NAME = re.compile(r"[\w.+-]{1,200}(/[\w.+-]{1,200})?")


@dataclass(frozen=True)
class RemoteFile:
    name: str
    size: int
    sha256: str


def pull_run(host: Host, run: str, target: Path | None, checkpoints: str) -> int:
    """Fetch the run into `target`; returns 0 when every file and checkpoint is verified, else 1."""
    target = target or Path("pulled") / Path(run).name
    _claim(target, host, run)
    say(f"pulling {run} into {target} …")
    receiver = Receiver(target)
    words = [".venv/bin/python", "-m", "tamis.remote.sender", run, "--checkpoints", checkpoints]
    script = f"[ -x .venv/bin/python ] || exit {NOT_SET_UP}; exec {shlex.join(words)}"
    if code := until_connected(host, lambda: receiver.receive(host.command(script))):
        return code
    problems = [*receiver.problems, *_damaged_checkpoints(target)]
    for problem in problems:
        say(problem, sys.stderr)
    steps = RunDirectory(target).checkpoints()
    newest = f", newest checkpoint step {steps[-1]}" if steps else ""
    state = "NOT complete" if problems else "all verified"
    say(f"{target}: {counted(receiver.fetched, 'file')} fetched, {receiver.kept} unchanged, {state}{newest}")
    return 1 if problems else 0


class Receiver:
    """Receives files into a folder, over as many connections as it takes."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.fetched = self.kept = 0
        self.problems: list[str] = []
        self._wrong_before: set[str] = set()

    def receive(self, command: list[str]) -> int:
        """One connection; returns its exit code, that of ssh's own failure when it ended too early."""
        self.kept = 0
        self.problems = []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                self._transfer(process.stdin, io.BufferedReader(process.stdout))  # type: ignore[type-var]
            except (EOFError, BrokenPipeError):
                return process.wait() or SSH_FAILED
            except BaseException:
                process.kill()
                raise
        return self.receive(command) if self._has_changed_files() else process.returncode

    def _transfer(self, requests: IO[bytes], stream: IO[bytes]) -> None:
        files = [file for file in self._listing(stream) if not self._is_here(file)]
        self._require_space(files)
        asked = [(file.name, self._offset(file)) for file in files]
        requests.write((json.dumps(asked) + "\n").encode())
        for file, (_, offset) in zip(files, asked, strict=True):
            self._receive_file(stream, file, offset)

    def _listing(self, stream: IO[bytes]) -> list[RemoteFile]:
        line = stream.readline(MOST_LISTING_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return [_checked(record) for record in json.loads(line)]

    def _is_here(self, file: RemoteFile) -> bool:
        path = self.target / file.name
        same = path.is_file() and path.stat().st_size == file.size and _sum(path) == file.sha256
        self.kept += same
        return same

    def _offset(self, file: RemoteFile) -> int:
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.is_file() else 0

    def _receive_file(self, stream: IO[bytes], file: RemoteFile, offset: int) -> None:
        part = self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "r+b" if part.exists() else "wb") as output:
            output.truncate(offset)
            output.seek(offset)
            while offset < file.size:
                block = stream.read(min(BLOCK_BYTES, file.size - offset))
                if not block:
                    raise EOFError
                output.write(block)
                if offset // REPORT_EVERY_BYTES != (offset + len(block)) // REPORT_EVERY_BYTES:
                    say(f"{file.name}: {offset / 1e6:,.0f} of {file.size / 1e6:,.0f} MB", sys.stderr)
                offset += len(block)
        if _sum(part) == file.sha256:
            part.replace(self.target / file.name)
            self.fetched += 1
        else:
            part.unlink()
            self.problems.append(f"{file.name}: its sha256 is not the one that the host computed")

    def _has_changed_files(self) -> bool:
        """True if sums were wrong for the first time: the files were rewritten meanwhile, or their parts were old."""
        wrong = {problem.partition(":")[0] for problem in self.problems}
        first_time = bool(wrong - self._wrong_before)
        self._wrong_before |= wrong
        return first_time

    def _part(self, file: RemoteFile) -> Path:
        return self.target / f"{file.name}.part"

    def _require_space(self, files: list[RemoteFile]) -> None:
        needed = sum(file.size - self._offset(file) for file in files)
        free = shutil.disk_usage(self.target).free
        if needed > free:
            raise ValueError(
                f"{needed / 1e9:.1f} GB are missing and {self.target} has {free / 1e9:.1f} GB left: make room, give "
                "another --to, or leave checkpoints out (--checkpoints none)"
            )


def _checked(record: Any) -> RemoteFile:
    """The record of a file, if its name stays inside the target."""
    name, size, sha256 = str(record["name"]), int(record["size"]), str(record["sha256"])
    if (
        not _NAME.fullmatch(name)
        or {"..", "."} & set(name.split("/"))
        or name.split("/")[0].startswith(".")
        or size < 0
    ):
        raise ValueError(f"the host sent an odd file name, {name!r}: nothing of it was written")
    return RemoteFile(name, size, sha256)


def _claim(target: Path, host: Host, run: str) -> None:
    """Mark the folder as this run's. Two runs are never mixed, and the mark names no host."""
    identity = hashlib.sha256(f"{host.name} {host.folder} {run}".encode()).hexdigest()
    mark = target / MARK
    if mark.exists():
        if mark.read_text(encoding="utf-8").strip() != identity:
            raise ValueError(f"{target} holds another run: give another folder with --to")
        return
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} holds other files: give another folder with --to")
    target.mkdir(parents=True, exist_ok=True)
    mark.write_text(identity + "\n", encoding="utf-8")


def _damaged_checkpoints(target: Path) -> list[str]:
    run = RunDirectory(target)
    found = [(step, damage(run.manifest(step))) for step in run.checkpoints()]
    return [f"checkpoint of step {step}: {problem}" for step, problem in found if problem]


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
