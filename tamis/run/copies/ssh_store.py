"""A store on another machine, over the user's own OpenSSH and rsync (`user@host:path`, `ssh://user@host:port/path`).

Keys, jump hosts and aliases come from the user's SSH configuration. No password is ever asked for.
"""

from __future__ import annotations

import atexit
import functools
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tamis.config import ConfigError
from tamis.run.copies.store import Transfer, store_error

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15"]
RSYNC = ["rsync", "--relative", "--partial", "--protect-args", "--timeout=60"]
COMMAND_TIMEOUT_S = 900.0  # the other machine may have to sum a large checkpoint
LOOK_EVERY_S = 0.2
MISSING = 44  # exit code of our own commands for a file that is not there


@dataclass(frozen=True)
class SshStore:
    """See `Store`. rsync continues an upload that was cut short; the other machine sums its own files."""

    host: str  # with the user, if one is named
    folder: str  # absolute, or relative to the user's home
    port: int | None = None

    @classmethod
    def at(cls, url: str) -> SshStore:
        if url.startswith("ssh://"):
            parts = urlsplit(url)
            host, port = parts.netloc.rpartition(":")[0] if parts.port else parts.netloc, parts.port
            folder = unquote(parts.path).removeprefix("/~/")
        else:
            host, _, folder = url.partition(":")
            port, folder = None, folder.removeprefix("~/")
        if not re.fullmatch(r"[\w\[]\S*", host) or not folder.isprintable():
            raise ConfigError(f"{url} is no address for copies: write user@host:path or ssh://host/path")
        return cls(host, folder.rstrip("/") or "/", port)

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder)
        return self._ssh(f"[ ! -d {path} ] || ls -1A -- {path}").decode(errors="replace").splitlines()

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        return self._ssh_if_there(f"[ -f {path} ] || exit {MISSING}; cat -- {path}")

    def write(self, name: str, content: bytes) -> None:
        path, temporary, parent = self._path(name), self._path(f"{name}.tmp"), self._parent(name)
        self._ssh(f"mkdir -p -- {parent} && cat > {temporary} && mv -f -- {temporary} {path}", content)

    def put(self, folder: str, files: Mapping[str, Path], transfer: Transfer) -> None:
        self._ssh(f"mkdir -p -- {self._path(folder)}")
        sources = [f"{str(path.absolute()).removesuffix(name)}./{name}" for name, path in files.items()]
        self._rsync([*sources, f"{self.host}:{self.folder}/{folder}/"], transfer)

    def get(self, folder: str, names: Sequence[str], target: Path) -> None:
        first, *others = [f":{self.folder}/{folder}/./{name}" for name in names]
        self._rsync([f"{self.host}{first}", *others, f"{target.absolute()}/"], Transfer())

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        tool = "if command -v sha256sum >/dev/null; then sum=sha256sum; else sum='shasum -a 256'; fi"
        sums = [f"if [ -f {path} ]; then $sum < {path}; else echo; fi" for path in map(self._path, names)]
        lines = self._ssh("; ".join([tool, *sums])).decode(errors="replace").splitlines()
        digests = (line.partition(" ")[0] for line in lines)
        return {name: digest for name, digest in zip(names, digests, strict=True) if digest}

    def remove(self, name: str) -> None:
        self._ssh(f"rm -rf -- {self._path(name)}")

    def _path(self, name: str) -> str:
        """The path, quoted for the other machine's shell; `./` keeps one that begins with - from being an option."""
        path = f"{self.folder}/{name}" if name else self.folder
        return shlex.quote(path if path.startswith("/") else f"./{path}")

    def _parent(self, name: str) -> str:
        return self._path(name.rpartition("/")[0])

    def _program(self) -> list[str]:
        return [*SSH, *_shared_connection(), *(["-p", str(self.port)] if self.port else [])]

    def _ssh_if_there(self, command: str) -> bytes | None:
        done = self._run(command)
        return None if done.returncode == MISSING else self._checked(done)

    def _ssh(self, command: str, content: bytes = b"") -> bytes:
        return self._checked(self._run(command, content))

    def _run(self, command: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        program = [*self._program(), self.host, "--", f"sh -c {shlex.quote(command)}"]
        try:
            return subprocess.run(program, input=content, capture_output=True, timeout=COMMAND_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise store_error(error) from error

    @staticmethod
    def _checked(done: subprocess.CompletedProcess[bytes]) -> bytes:
        if done.returncode:
            raise store_error(_problem(done.stderr) or f"ssh ended with exit code {done.returncode}")
        return done.stdout

    def _rsync(self, paths: list[str], transfer: Transfer) -> None:
        """Run rsync on sources and a target; what follows `/./` in a source is its path below the target."""
        limit = [] if transfer.bytes_per_s is None else [f"--bwlimit={max(1, round(transfer.bytes_per_s / 1024))}"]
        command = [*RSYNC, *limit, "-e", shlex.join(self._program()), "--", *paths]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise store_error(error) from error
        with process:
            try:
                problem = _wait(process, transfer)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise store_error(problem or f"rsync ended with exit code {process.returncode}")


@functools.cache
def _shared_connection() -> list[str]:
    """Options by which the many short commands share one connection; it ends a minute after the last."""
    folder = tempfile.mkdtemp(prefix="tamis_ssh_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C", "-o", "ControlPersist=60"]


def _wait(process: subprocess.Popen[bytes], transfer: Transfer) -> str:
    """Wait for a program, and return the problem it names; TransferCancelled when it is not wanted any more."""
    while True:
        try:
            return _problem(process.communicate(timeout=LOOK_EVERY_S)[1])
        except subprocess.TimeoutExpired:
            transfer.check()


def _problem(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").splitlines()
    return " ".join(line for line in lines if not line.startswith("Warning:"))
