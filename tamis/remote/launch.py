"""`run`, `launch` and `halt`: start a run in the background on a host, exactly once, and stop it.

A start has an id. Its output and exit code are kept on the host under that id, so a command that lost its connection
asks for the same start again and gets the same answer.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

from tamis.remote.connection import ACTIVE, NOT_SET_UP, Host, runs_on, streamed, tamis_script, until_connected
from tamis.run.files.console import say

STARTS = ".starts"  # below the folder there
OLDEST_START_DAYS = 7
NOTIFY_VARIABLE = "TAMIS_NOTIFY"  # addresses with secrets, which no file of a run holds
MOST_LINE_BYTES = 32_768


def launch_remotely(host: Host, verb: str, words: list[str]) -> int:
    """Run `tamis run` or `tamis launch` there, detached; returns its exit code."""
    runs_on(host)  # the first connection must succeed
    words = [send_config(host, word) for word in words if word != "--detach"]
    script = _start_script(secrets.token_hex(8), tamis_script(verb, *words, "--detach"))
    notify = " ".join(os.environ.get(NOTIFY_VARIABLE, "").split())
    if notify:  # on stdin: a command line shows in the process lists of both machines
        script = f"IFS= read -r {NOTIFY_VARIABLE} && export {NOTIFY_VARIABLE}; {script}"
    say(f"starting tamis {shlex.join([verb, *words])} there …")
    code = until_connected(host, lambda: _streamed_with_line(host.command(script), notify))
    if code == 0:
        how = "logs -f, monitor, tunnel, halt, pull"
        say(f"the run goes on there whatever happens here. Next: tamis remote {host.name} VERB ({how})")
    return code


def _streamed_with_line(command: list[str], line: str) -> int:
    """Run a command whose input is one line, which fits into a pipe."""
    reader, writer = os.pipe()
    try:
        os.write(writer, line.encode()[:MOST_LINE_BYTES] + b"\n")
        os.close(writer)
        return streamed(command, stdin=reader)
    finally:
        os.close(reader)


def send_config(host: Host, word: str) -> str:
    """Send a config file of this machine; returns the word as it names the file there."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml") or "=" in word or not path.is_file():
        return word
    inside = not path.is_absolute() and ".." not in path.parts
    there = path if inside else Path("configs") / path.name
    script = f"mkdir -p {shlex.quote(str(there.parent))} && cat > {shlex.quote(str(there))}"

    def attempt() -> int:
        with open(path, "rb") as file:
            return streamed(host.command(script), stdin=file)

    if until_connected(host, attempt):
        raise OSError(f"{path} could not be written on {host.name}: read the lines above")
    return str(there)


def _start_script(name: str, command: str) -> str:
    """Run the command once, with its output in a file: a connection that is lost cannot end it half-way."""
    files = shlex.quote(f"{STARTS}/{name}")
    once = f"[ -s {files}.code ] || {{ ( {command} ) </dev/null >{files}.out 2>&1; echo $? >{files}.code; }}"
    return (
        f"[ -x .venv/bin/python ] || exit {NOT_SET_UP}; mkdir -p {STARTS}; "
        f"find {STARTS} -type f -mtime +{OLDEST_START_DAYS} -delete; "
        f"flock {STARTS}/lock sh -c {shlex.quote(once)}; "
        f'cat {files}.out; exit "$(cat {files}.code)"'
    )


def halt_remotely(host: Host, run: str | None, reason: str) -> int:
    """Halt a run and wait until it has stopped; without a name, the one that is under way."""
    active = [str(found["run"]) for found in runs_on(host) if found.get("state") in ACTIVE]
    if run is None and not active:
        say(f"no run is under way on {host.name}", sys.stderr)
        return 0
    if run is None and len(active) > 1:
        raise ValueError(f"several runs are under way on {host.name}, name one: {', '.join(active)}")
    script = tamis_script("halt", run or active[0], "--reason", reason)
    return until_connected(host, lambda: streamed(host.command(script), stdin=subprocess.DEVNULL))
