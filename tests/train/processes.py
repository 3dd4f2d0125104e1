"""Real processes for tests: the ranks of a run, forked from a server that has torch loaded, so that starts are cheap.

Each rank finds itself as under torchrun (RANK, WORLD_SIZE, …), writes its output to a file, and can be signalled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from tamis.config import Config, load_config

SHOWCASE = Path(__file__).parents[2] / "configs" / "train_showcase.yaml"
TINY = [
    "model.n_layers=2",
    "model.dim=16",
    "model.n_heads=2",
    "model.n_kv_groups=1",
    "model.d_k=8",
    "model.d_ff=32",
    "train.seq_len=32",
    "train.batch_size=2",
    "train.warmup_steps=2",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.log_every=1",
    "train.tensorboard=false",
    "train.sample_prompt=null",
    "train.samples=0",
    "data.lanes=4",
    "data.prefetch_batches=1",
    "runtime.weight_check_every=1",
]
WAIT_S = 200.0  # far more than anything here takes: a hang must fail the test, not the suite

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.train.imported"])


def tiny_config(out_dir: Path, *overrides: str) -> Config:
    return load_config(SHOWCASE, [*TINY, f"train.out_dir={out_dir}", *overrides])


def train_rank(config: Config, resume: str | None = None) -> int:
    from tamis.train.main import train_config

    return train_config(config, resume)


class RankProcesses:
    """The processes of one run while they live."""

    def __init__(self, processes: list[Any], logs: list[Path]) -> None:
        self.processes, self._logs = processes, logs

    def wait(self) -> list[int]:
        """The exit codes, in rank order; negative for a signal."""
        deadline = time.monotonic() + WAIT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        assert not hanging, f"ranks {hanging} hang:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def log(self, rank: int) -> str:
        return self._logs[rank].read_text(encoding="utf-8", errors="replace")

    def output(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in range(len(self._logs)))


@contextlib.contextmanager
def ranks(folder: Path, world_size: int, body: Callable[..., int | None], *arguments: Any) -> Iterator[RankProcesses]:
    """Start `body(*arguments)` in as many processes; whatever still lives at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    # The parent keeps the store open, as torchrun does: a port that is only looked up can be taken in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = [
        context.Process(target=_be_rank, args=(rank, world_size, store.port, str(logs[rank]), body, arguments))
        for rank in range(world_size)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)  # the suite interprets kernels; a trainer on a CPU does not
        for process in processes:
            process.start()
    try:
        yield RankProcesses(processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_ranks(folder: Path, world_size: int, body: Callable[..., int | None], *arguments: Any) -> str:
    """Run to the end, which must be a good one on every rank; returns what they printed."""
    with ranks(folder, world_size, body, *arguments) as running:
        codes = running.wait()
        assert codes == [0] * world_size, f"{codes}\n{running.output()}"
        return running.output()


def _be_rank(rank: int, world_size: int, port: int, log: str, body: Callable[..., int | None], arguments: Any) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(body(*arguments))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening_addresses(parent: psutil.Process) -> set[str]:
    sockets = [s for process in (parent, *parent.children(recursive=True)) for s in process.net_connections()]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)
