"""Commands on a host through the user's own ssh, with its configuration, keys, agent and jump hosts.

The host's shell sees one quoted script; here no shell runs. A command whose connection is lost is repeated once the
host answers again, so every command must be one that can be repeated.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from tamis.run.files.console import counted, printable, printable_line, say

SSH_FAILED = 255  # exit code of ssh when the connection failed; no tamis command has it
NOT_SET_UP = 97
QUERY_TIMEOUT_S = 120
ACTIVE = ("starting", "running", "restarting")
OPTIONS = ["-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
LONGEST_PAUSE_S = 30.0
PATIENCE_S = 600.0  # for a host that does not answer
DAY_S = 86_400.0


class Unreachable(OSError):
    """ssh could not connect; the message has its words."""


class NotSetUp(ValueError):
    """The host has no Tamis in the folder."""


@dataclass(frozen=True)
class Host:
    name: str
    folder: str

    def command(self, script: str, *, terminal: bool = False, options: Sequence[str] = ()) -> list[str]:
        """The ssh command line for a script that starts in the folder."""
        enter = f"cd {shlex.quote(self._path)} || exit {NOT_SET_UP}; {script}"
        return [*self._ssh(terminal, options), "sh -c " + shlex.quote(enter)]

    def outside(self, script: str) -> list[str]:
        """The same for a script that starts in the home directory, with the folder as $1."""
        return [*self._ssh(False, ()), f"sh -c {shlex.quote(script)} sh {shlex.quote(self._path)}"]

    @property
    def _path(self) -> str:
        """The folder as the host's shell takes it; ssh starts in the home directory."""
        path = self.folder.removeprefix("~/") or "."
        return f"./{path}" if path.startswith("-") else path

    def _ssh(self, terminal: bool, options: Sequence[str]) -> list[str]:
        program = shlex.split(os.environ.get("TAMIS_SSH") or "ssh")
        return [*program, *OPTIONS, *options, "-tt" if terminal else "-T", "--", self.name]


def tamis_script(*words: str) -> str:
    """The script of one `tamis` command; the folder is the current directory."""
    return f"[ -x .venv/bin/python ] || exit {NOT_SET_UP}; exec .venv/bin/python -u -m {shlex.join(['tamis', *words])}"


def query(host: Host, command: list[str]) -> str:
    """The output of a short command. Raises Unreachable, NotSetUp, or ValueError with the command's own message."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=QUERY_TIMEOUT_S
        )
    except FileNotFoundError:
        raise ValueError(f"there is no {command[0]} here: install OpenSSH, or set TAMIS_SSH") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{host.name} did not answer within {QUERY_TIMEOUT_S} s") from None
    problem = printable_line(done.stderr.strip().rpartition("\n")[2])
    if done.returncode == SSH_FAILED:
        raise Unreachable(f"cannot connect to {host.name} ({problem}): `ssh {host.name}` must work first")
    if done.returncode == NOT_SET_UP:
        raise NotSetUp(f"{host.name} is not set up in {host.folder}: tamis remote {host.name} setup")
    if done.returncode:
        raise ValueError(f"{host.name}: {problem.removeprefix('error: ') or f'exit code {done.returncode}'}")
    return done.stdout


def runs_on(host: Host) -> list[dict[str, Any]]:
    """The runs on a host as `tamis list --json` gives them, the newest last."""
    output = query(host, host.command(tamis_script("list", "--json")))
    try:
        runs = json.loads(output.strip().rpartition("\n")[2])
        return [run for run in runs if isinstance(run["run"], str)]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{host.name} answered something else than its runs: {printable_line(output[:200])}") from None


def newest_run(host: Host, asked: str | None) -> str:
    """The run that was asked for, or the newest one there; this first connection must succeed."""
    runs = runs_on(host)
    if asked is not None:
        return asked
    if not runs:
        raise ValueError(f"there is no run on {host.name} yet: tamis remote {host.name} run")
    name = str(runs[-1]["run"])
    if len(runs) > 1:
        say(f"{counted(len(runs), 'run')} there; this is the newest, {name}", sys.stderr)
    return name


def until_connected(host: Host, attempt: Callable[[], int], patience_s: float = PATIENCE_S) -> int:
    """Repeat an attempt whose connection was lost, with growing pauses; returns its exit code.

    The patience counts from the last attempt that stayed connected for a while.
    """
    pause_s, given_up_at = 1.0, time.monotonic() + patience_s
    while True:
        began = time.monotonic()
        if (code := attempt()) != SSH_FAILED:
            return code
        now = time.monotonic()
        if now - began > LONGEST_PAUSE_S:
            pause_s, given_up_at = 1.0, now + patience_s
        if now > given_up_at:
            raise Unreachable(
                f"{host.name} could not be reached for {patience_s / 60:.0f} minutes; what runs there goes on"
            )
        say(f"connection to {host.name} lost; what runs there goes on. Connecting again in {pause_s:.0f} s", sys.stderr)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def attached(command: list[str]) -> int:
    """Run a command with this terminal's input and output."""
    return subprocess.run(command).returncode


def streamed(command: list[str], stdin: int | IO[bytes] = subprocess.DEVNULL) -> int:
    """Run a command and print its output line by line, with escapes made harmless."""
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE) as process:
        for line in lines_of(process):
            print(printable(line), flush=True)
    return process.returncode


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """The lines that a process prints, as they are: not safe for a terminal."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line.decode(errors="replace").rstrip("\r\n")
