"""The real trainer under torchrun and the supervisor: stacks on request, a killed rank, a stop of everything."""

import base64
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from tests.faults.forking_trainer import tiny_real_config
from tests.faults.launched import Launched
from tests.faults.test_real_trainer import assert_same_end
from tests.train.processes import listening_addresses

STEPS, HELD = 12, 6  # every test acts while the run stands inside its sixth step


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def attack(port: int, file: Path) -> None:
    """Put code where torchrun's own rendezvous unpickles it; no credential is needed."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store.set("torch.rendezvous.none", base64.b64encode(pickle.dumps(Payload(file))).decode())


class LaunchedForReal(Launched):
    listening: set[str]
    attacked: list[int]

    def attack_stores(self) -> None:
        """Attack every port on which the agent of torchrun listens."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        [agent] = [process for process in processes if "tamis.train.tools.torchrun" in process.cmdline()]
        self.attacked = [socket.laddr.port for socket in agent.net_connections() if socket.status == "LISTEN"]
        for port in self.attacked:
            attack(port, self.run.path / "code_ran")

    def found_by_operators(self) -> list[psutil.Process]:
        """What `pgrep -f scripts/train_showcase.py` gives among the supervisor's descendants."""
        everything = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in everything if "scripts/train_showcase.py" in " ".join(process.cmdline())]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator:
    started: list[Launched] = []

    def start(out: Path) -> LaunchedForReal:
        config = tiny_real_config(out, steps=STEPS, save_every=4, eval_every=0)
        launched = LaunchedForReal(config, ranks=2, TRAINER="paced", HOLD_AT=str(HELD))
        started.append(launched)
        launched.until_step(HELD, ranks=2)
        return launched

    yield start
    for launched in started:
        launched.end()


@pytest.fixture(scope="module")
def asked_for_stacks(two_ranks, tmp_path_factory) -> LaunchedForReal:
    """A whole run whose store is attacked, and in which everything an operator finds gets USR1 once."""
    launched = two_ranks(tmp_path_factory.mktemp("unbroken"))
    launched.listening = listening_addresses(psutil.Process(launched.process.pid))
    launched.attack_stores()
    for process in launched.found_by_operators():
        process.send_signal(signal.SIGUSR1)
    launched.let_go_on()
    assert launched.wait(200) == 0, launched.told()
    return launched


def test_nothing_of_a_run_on_one_machine_can_be_reached_from_another(asked_for_stacks) -> None:
    assert asked_for_stacks.listening == {"127.0.0.1"}


def test_code_in_the_store_of_a_run_is_never_unpickled(asked_for_stacks, tmp_path) -> None:
    assert len(asked_for_stacks.attacked) == 1
    assert not (asked_for_stacks.run.path / "code_ran").exists()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    attack(store.port, tmp_path / "code_ran")
    state = C10dRendezvousBackend(store, "none").get_state()
    assert state is not None
    pickle.loads(state[0]).close()  # noqa: S301 (as torch's rendezvous does)
    assert (tmp_path / "code_ran").exists(), "the attack is a real one"


def test_a_torchrun_typed_by_hand_is_bound_to_loopback_too(tmp_path) -> None:
    (tmp_path / "worker.py").write_text(
        "import os, psutil\n"
        "sockets = psutil.Process(os.getppid()).net_connections()\n"
        "print(sorted({s.laddr.ip for s in sockets if s.status == 'LISTEN'}))\n"
    )
    torchrun = [sys.executable, "scripts/_torchrun.py", "--standalone", "--rdzv-backend=c10d", "--nproc_per_node=1"]
    ended = subprocess.run([*torchrun, str(tmp_path / "worker.py")], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "['127.0.0.1']\n"), ended.stderr


def test_usr1_gives_the_stacks_of_every_rank_and_training_continues(asked_for_stacks) -> None:
    ranks = {path.name.split("_")[1] for path in asked_for_stacks.run.stackdumps()}
    assert ranks == {"rank0", "rank1"}
    assert asked_for_stacks.events() == ["start", "end"]


def test_a_killed_rank_is_restarted_and_the_weights_end_identical(two_ranks, asked_for_stacks, tmp_path) -> None:
    launched = two_ranks(tmp_path)
    os.kill(launched.worker_pid(rank=1), signal.SIGKILL)
    launched.let_go_on()
    assert launched.wait(200) == 0, launched.told()
    assert "restart" in launched.events()
    assert_same_end(launched.run, asked_for_stacks.run)


def test_pkill_of_everything_saves_and_ends_with_four(two_ranks, tmp_path) -> None:
    launched = two_ranks(tmp_path)
    for process in launched.found_by_operators():
        process.send_signal(signal.SIGTERM)
    launched.let_go_on()
    assert launched.wait(200) == 4, launched.told()
    assert launched.run.checkpoints()[-1] == launched.beats()[-1].step
    assert {launched.beats(rank)[-1].phase for rank in (0, 1)} == {"halted"}
    assert "Traceback" not in launched.told()
