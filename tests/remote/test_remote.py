"""`tamis remote` against a real sshd, from a Python without packages: set up, run, look, lose the connection, pull."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.manifest import latest_valid_checkpoint
from tests.faults.launched import tiny_config
from tests.loopback_ssh import GONE
from tests.remote.conftest import Laptop

RUN = "artifacts/tiny"
SECRET = "a-secret-address"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.05)


def there(laptop: Laptop) -> RunDirectory:
    return RunDirectory(laptop.host_folder / RUN)


def files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_setup_sends_tracked_files_alone_bootstraps_and_checks(laptop: Laptop) -> None:
    code, output = laptop.types(
        "gpubox", "setup", "configs/train_showcase.yaml", "--quick", "--folder", str(laptop.host_folder)
    )
    assert code == 0, output
    assert "[bootstrap] --from-script" in output and "preflight: GO" in output
    assert (laptop.host_folder / "tamis" / "remote" / "command.py").is_file()
    assert not (laptop.host_folder / ".env").exists()
    assert len((laptop.host_folder / ".commit").read_text().strip()) == 40


def test_setup_again_removes_what_is_no_longer_sent_and_nothing_else(laptop: Laptop) -> None:
    (laptop.host_folder / "artifacts").mkdir()
    (laptop.host_folder / "artifacts" / "kept").touch()
    laptop.git("rm", "-q", "old.txt")
    (laptop.checkout / "configs" / "train_showcase.yaml").open("a").write("\n")
    code, output = laptop.types("gpubox", "setup", "configs/train_showcase.yaml", "--quick")
    assert code == 0, output
    assert not (laptop.host_folder / "old.txt").exists() and (laptop.host_folder / "artifacts" / "kept").exists()
    assert " with changes " in (laptop.host_folder / ".commit").read_text()


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(laptop: Laptop) -> None:
    foreign = laptop.host_folder.parent / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    code, output = laptop.types("otherbox", "setup", "--folder", str(foreign))
    assert code == 2 and "holds other files: choose another --folder" in output
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]


def test_a_run_is_started_once_even_when_the_connection_is_lost_meanwhile(laptop: Laptop) -> None:
    (laptop.checkout / "mine.yaml").write_text(tiny_config(RUN, steps=40).to_yaml())
    laptop.environment["TAMIS_NOTIFY"] = f"https://example.org/{SECRET} ntfy://topic"
    process = laptop.start("gpubox", "run", "mine.yaml")
    until(lambda: list((laptop.host_folder / ".starts").glob("*.out")))  # the command there has begun
    assert not [found for found in psutil.process_iter(["cmdline"]) if SECRET in str(found.info["cmdline"])]
    assert laptop.ssh.cut()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "connection to gpubox lost" in output and "launched in the background as process" in output
    assert [event["event"] for event in read_events(there(laptop))] == ["start"]
    received = laptop.host_folder / "notify_of_the_run"
    assert received.read_text() == laptop.environment.pop("TAMIS_NOTIFY")
    received.unlink()
    assert SECRET not in output and files_with(laptop.host_folder, SECRET) == []


def test_setup_is_refused_while_a_run_is_under_way(laptop: Laptop) -> None:
    until(lambda: there(laptop).heartbeats())
    code, output = laptop.types("gpubox", "setup")
    assert code == 2 and f"{RUN} is under way on gpubox" in output


def test_several_hosts_are_listed_in_one_table(laptop: Laptop) -> None:
    code, output = laptop.types(f"gpubox,otherbox,{GONE}", "status")
    heading, first, second, third = output.splitlines()
    assert code == 1  # one host could not be reached
    assert heading.split() == ["host", "state", "step", "loss", "tok/s", "run"]
    assert first.split()[:2] == ["gpubox", "running"] and first.endswith(RUN)
    assert second.startswith("otherbox  not set up") and third.startswith(f"{GONE}   unreachable")


def test_followed_logs_continue_after_a_lost_connection_without_repeating_a_line(laptop: Laptop) -> None:
    process = laptop.start("gpubox", "logs", "-f")
    assert process.stdout is not None
    first = next(line for line in process.stdout if "begins after step 0" in line)
    laptop.ssh.cut()
    (there(laptop).path / "go_on").touch()
    rest = process.stdout.read()
    assert process.wait() == 0, rest
    assert "connection to gpubox lost" in rest and "[supervisor] end: " in rest
    assert (first + rest).count("begins after step 0") == 1


def test_pull_fetches_a_verified_run_and_names_neither_host_nor_user(laptop: Laptop) -> None:
    code, output = laptop.types("gpubox", "pull")
    assert code == 0, output
    assert "all verified, newest checkpoint step 40" in output
    pulled = laptop.checkout / "pulled" / "tiny"
    assert latest_valid_checkpoint(pulled) == 40
    assert (pulled / "training.csv").read_bytes() == there(laptop).training_csv.read_bytes()
    assert files_with(pulled, "gpubox") == files_with(there(laptop).path, "gpubox") == []


def test_halt_without_a_run_under_way_and_status_of_one_run(laptop: Laptop) -> None:
    assert laptop.types("gpubox", "halt") == (0, "[tamis] no run is under way on gpubox\n")
    code, output = laptop.types("gpubox", "status", RUN)
    assert (code, output[:4]) == (0, "DONE")


def test_the_live_screen_is_shown_in_this_terminal(laptop: Laptop) -> None:
    laptop.ssh.require_terminal()
    master, terminal = pty.openpty()
    command = [sys.executable, "-S", "-m", "tamis", "remote", "gpubox", "monitor"]
    process = subprocess.Popen(
        command, cwd=laptop.checkout, env=laptop.environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    seen = b""
    while b"DONE" not in seen:
        seen += os.read(master, 65536)
    os.write(master, b"q")
    with suppress(OSError):  # the end of a terminal
        while os.read(master, 65536):
            pass
    assert process.wait(60) == 0
    os.close(master)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_live_page_and_tensorboard_are_seen_through_a_tunnel_and_end_with_it(laptop: Laptop) -> None:
    laptop.ssh.require_terminal()
    port, board = free_port(), free_port()
    process = laptop.start("gpubox", "tunnel", "--port", str(port), "--tensorboard", str(board))
    assert process.stdout is not None
    first, line = process.stdout.readline(), process.stdout.readline()
    assert f"TensorBoard: http://127.0.0.1:{board} " in first, first
    assert f"live page: http://127.0.0.1:{port}/" in line, line
    until(lambda: page_at(board))
    assert ">tiny/<" in page_at(board)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=60) as events:
        assert b'"state": "done"' in b"".join(events.readline() for _ in range(5))
    os.killpg(process.pid, signal.SIGINT)
    assert "what runs on the host goes on" in process.communicate(timeout=60)[0]
    until(lambda: not [found for found in psutil.process_iter() if cwd_of(found) == str(laptop.host_folder)])


def page_at(port: int) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
        return page.read().decode()
    return ""


def cwd_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.cwd()
    return ""


def test_halt_stops_the_run_that_is_under_way(laptop: Laptop) -> None:
    (laptop.checkout / "other.yaml").write_text(tiny_config("artifacts/other", steps=4000).to_yaml())
    assert laptop.types("gpubox", "run", "other.yaml")[0] == 0
    other = RunDirectory(laptop.host_folder / "artifacts" / "other")
    (other.path / "go_on").touch()
    code, output = laptop.types("gpubox", "halt", "--reason", "enough of it")
    assert code == 0, output
    assert "asked artifacts/other to halt at the next step boundary: enough of it" in output
    assert "stopped; newest checkpoint artifacts/other/checkpoint_step" in output


def test_a_host_can_be_forgotten(laptop: Laptop) -> None:
    settings = laptop.host_folder.parents[1] / "settings" / "tamis" / "hosts.json"
    assert json.loads(settings.read_text()) == {"gpubox": str(laptop.host_folder)}
    assert laptop.types("gpubox", "forget")[0] == 0
    code, output = laptop.types("list")
    assert code == 2 and "no host was set up from here yet" in output
