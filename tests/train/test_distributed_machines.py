"""Two machines, as two torchrun agents that meet by rendezvous: the same command, restarts included."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tamis.config import ConfigError
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import Heartbeat, read_heartbeats
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.train.network import require_private_address
from tamis.train.tools import torchrun
from tests.train.processes import WAIT_S, free_port, listening_addresses, tiny_config, wait_until

ENDPOINT = "127.0.0.2"  # on the loopback interface, and not the address that a name resolves to


def machine(config_yaml: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """What an operator types on each machine (docs/multi-node.md), here with one process per machine."""
    rendezvous = [f"--rdzv-endpoint={ENDPOINT}:{port}", "--rdzv-id=test"]
    torchrun = [sys.executable, "-m", "tamis.train.tools.torchrun", "--nnodes=2", "--nproc-per-node=1", *rendezvous]
    worker = ["-m", "tamis.train.main", "--config", str(config_yaml), "--resume", "auto"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with log.open("wb") as file:
        return subprocess.Popen([*torchrun, "--max-restarts=5", *worker], stdout=file, stderr=file, env=environment)


def last_beat(run: RunDirectory, rank: int) -> Heartbeat | None:
    beats = read_heartbeats(run.heartbeat(rank), tail=1)
    return beats[-1] if beats else None


def reached(run: RunDirectory, step: int, not_pid: int = 0) -> bool:
    """Whether both ranks have come to that step, rank 1 as another process than `not_pid`."""
    beats = [last_beat(run, rank) for rank in (0, 1)]
    return all(beat is not None and beat.step >= step and beat.pid != not_pid for beat in beats)


def test_a_killed_worker_is_restarted_on_both_machines_and_a_halt_is_final(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "train.steps=100000", "train.save_every=10")
    run, config_yaml, port = RunDirectory(config.train.out_dir), tmp_path / "config.yaml", free_port()
    config_yaml.write_text(config.to_yaml())
    logs = [tmp_path / f"machine{number}.log" for number in (0, 1)]
    machines = [machine(config_yaml, port, log) for log in logs]
    try:
        wait_until(lambda: reached(run, 25), "both machines train")
        listening = [listening_addresses(psutil.Process(process.pid)) for process in machines]
        assert ENDPOINT in set.union(*listening) <= {ENDPOINT, "127.0.0.1"}, "no store listens on every interface"
        victim = last_beat(run, 1)
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: reached(run, 25, not_pid=victim.pid) and started_again(run), "training goes on")
        run.halt.touch()
        codes = [process.wait(timeout=WAIT_S) for process in machines]
        assert codes == [0, 0]
    finally:
        for process in machines:
            process.kill()
            process.wait()
    said = "\n".join(log.read_text(errors="replace") for log in logs)
    beats = [last_beat(run, rank) for rank in (0, 1)]
    assert [(beat.phase, beat.exit_code) for beat in beats if beat] == [("halted", 3), ("halted", 3)], said
    assert "resuming from" in said and said.count("halted at step") == 1, said
    assert "a restart does not change that" not in said, "torchrun does not restart a halted run"
    assert "ChildFailedError" not in said, "a halt is not shown as a crash"
    assert latest_valid_checkpoint(run) == beats[0].step == beats[1].step  # type: ignore[union-attr]


def started_again(run: RunDirectory) -> bool:
    """Whether rank 0 has finished a step since its second start."""
    beats = read_heartbeats(run.heartbeat(0))
    boots = [index for index, beat in enumerate(beats) if beat.phase == "boot"]
    return len(boots) > 1 and any(beat.phase == "step_end" for beat in beats[boots[-1] :])


def test_machines_that_meet_at_a_public_address_are_refused_unless_the_operator_allows_it(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"8\.8\.8\.8.*a public address.*TAMIS_PUBLIC_NETWORK=1"):
        require_private_address("8.8.8.8")
    for private in ("10.0.0.7", "127.0.0.1", "fd00::7", "no-such-host.invalid"):
        require_private_address(private)
    monkeypatch.setenv("TAMIS_PUBLIC_NETWORK", "1")
    require_private_address("8.8.8.8")


def test_torchrun_for_several_machines_refuses_an_endpoint_that_is_public_or_leads_nowhere(capfd) -> None:
    for endpoint, words in {
        "--rdzv_endpoint=8.8.8.8:29400": "a public address",
        "--rdzv_endpoint=localhost:29400": "which no other machine reaches",
        "--rdzv_endpoint=no-such-host.invalid": "has no address here",
        "--max_restarts=1": "several machines need --rdzv_endpoint=ADDRESS:PORT",
    }.items():
        assert torchrun.main(["--nnodes=2", endpoint, "-m", "tamis.train.main"]) == 2
        assert words in capfd.readouterr().err
