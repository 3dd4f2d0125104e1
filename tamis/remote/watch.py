"""`status`, `logs`, `monitor` and `tunnel`: look at runs on hosts, and keep looking when a connection is lost."""

from __future__ import annotations

import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tamis.remote.connection import (
    DAY_S,
    Host,
    NotSetUp,
    Unreachable,
    attached,
    lines_of,
    newest_run,
    runs_on,
    streamed,
    tamis_script,
    until_connected,
)
from tamis.run.files.console import printable, printable_line, say

HEADING = ("host", "state", "step", "loss", "tok/s", "run")
WRONG_STATES = ("crashed", "failed", "unreachable")
POSITION = "\x1e"  # begins a line of `tamis logs --positions` that holds an offset
PORTS = range(20_000, 32_768)  # of a host; from 32,768 on, Linux gives them to outgoing connections


def print_table(hosts: list[Host]) -> int:
    """One row for each run of each host; returns 1 if a run crashed or failed, or a host could not be reached."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        rows = [row for of_host in pool.map(_rows, hosts) for row in of_host]
    widths = [max(len(row[column]) for row in (HEADING, *rows)) for column in range(5)]
    for row in (HEADING, *rows):
        print("  ".join([*map(str.ljust, row[:5], widths), row[5]]), flush=True)
    return 1 if any(row[1] in WRONG_STATES for row in rows) else 0


def _rows(host: Host) -> list[tuple[str, ...]]:
    try:
        runs = runs_on(host)
    except NotSetUp as error:
        return [(host.name, "not set up", "-", "-", "-", str(error))]
    except (Unreachable, ValueError) as error:
        return [(host.name, "unreachable", "-", "-", "-", str(error))]
    return [_row(host, run) for run in runs] or [(host.name, "no run", "-", "-", "-", "-")]


def _row(host: Host, run: dict[str, Any]) -> tuple[str, ...]:
    step, steps, loss, speed = (run.get(key) for key in ("step", "steps", "loss", "toks_per_s"))
    cells = (
        f"{step}/{steps}" if steps else str(step),
        f"{loss:.4f}" if isinstance(loss, float) else "-",
        f"{speed:,.0f}" if isinstance(speed, float) else "-",
    )
    return (host.name, *map(printable_line, (run.get("state"), *cells, run["run"])))


def print_remote_status(host: Host, run: str) -> int:
    """Print the few lines of `tamis status` there."""
    return until_connected(host, lambda: streamed(host.command(tamis_script("status", run))))


def follow_logs(host: Host, run: str | None, lines: int, follow: bool) -> int:
    """Print the end of a run's log; with `follow`, each line once, also over several connections."""
    name = newest_run(host, run)
    if not follow:
        script = tamis_script("logs", name, "--lines", str(lines))
        return until_connected(host, lambda: streamed(host.command(script)))
    printer = _LogPrinter(host, name, lines)
    return until_connected(host, printer.attempt, patience_s=DAY_S)


class _LogPrinter:
    """Prints lines once the offset behind them has arrived, from which the next connection continues."""

    def __init__(self, host: Host, run: str, lines: int) -> None:
        self._host, self._run, self._lines = host, run, lines
        self._offset: str | None = None

    def attempt(self) -> int:
        start = ["--lines", str(self._lines)] if self._offset is None else ["--after", self._offset]
        script = tamis_script("logs", self._run, "--follow", "--positions", *start)
        waiting: list[str] = []
        with subprocess.Popen(self._host.command(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            for line in lines_of(process):
                if not line.startswith(POSITION):
                    waiting.append(line)
                    continue
                self._offset = str(int(line.removeprefix(POSITION)))
                for held in waiting:
                    print(printable(held), flush=True)
                waiting.clear()
        return process.returncode


def show_monitor(host: Host, run: str | None) -> int:
    """The live screen there in this terminal; without a terminal, its text once."""
    name = newest_run(host, run)
    if not sys.stdout.isatty():
        return until_connected(host, lambda: streamed(host.command(tamis_script("monitor", name, "--once"))))
    command = host.command(tamis_script("monitor", name), terminal=True)
    return until_connected(host, lambda: attached(command), patience_s=DAY_S)


def open_tunnel(host: Host, run: str | None, port: int, tensorboard_port: int | None) -> int:
    """Serve the live page, and TensorBoard if asked, on ports of this machine until Ctrl-C."""
    runs_on(host)  # the first connection must succeed
    for wanted in filter(None, (port, tensorboard_port)):
        _require_free(wanted)
    page = _Forwarded(host, port, lambda there: tamis_script("monitor", run or "artifacts", "--web", "--port", there))
    if tensorboard_port is None:
        return until_connected(host, page.attempt, patience_s=DAY_S)
    say(f"TensorBoard: http://127.0.0.1:{tensorboard_port} (a few seconds after the page)")
    board = _Forwarded(host, tensorboard_port, _tensorboard_script)

    def attempt() -> int:
        with subprocess.Popen(board.command()[1], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                return page.attempt()
            finally:
                process.terminate()

    return until_connected(host, attempt, patience_s=DAY_S)


class _Forwarded:
    """A program there that listens on its loopback, forwarded to a port here. It ends with the connection."""

    def __init__(self, host: Host, port: int, script: Callable[[str], str]) -> None:
        self._host, self._port, self._script = host, port, script

    def command(self) -> tuple[str, list[str]]:
        """The port there, drawn for each connection because an earlier one may still hold its own; and the command."""
        there = str(random.choice(PORTS))
        options = ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{self._port}:127.0.0.1:{there}"]
        return there, self._host.command(self._script(there), terminal=True, options=options)

    def attempt(self) -> int:
        there, command = self.command()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            for line in lines_of(process):
                print(printable(line.replace(f":{there}", f":{self._port}")), flush=True)
        return process.returncode


def _tensorboard_script(port: str) -> str:
    words = [".venv/bin/tensorboard", "--logdir", "artifacts", "--host", "127.0.0.1", "--port", port]
    return "exec " + shlex.join(words)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ValueError(f"port {port} is in use here: give another --port or --tensorboard") from None
