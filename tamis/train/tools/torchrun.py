"""torchrun for one machine: its store listens on the loopback interface alone, and its last words are short.

`torchrun --standalone` listens on every interface and unpickles what a client puts into its store, so anyone who
reaches the port runs code. Here the rendezvous needs no pickle, and store and collectives stay on 127.0.0.1.

python -m tamis.train.tools.torchrun --nproc_per_node 2 -m tamis.train.main --config OUT/config.yaml
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import main as torchrun

from tamis.run.files.console import say
from tamis.run.files.exit_codes import ExitCode

BACKEND = "loopback"
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 600
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # of the collectives' own sockets
REQUESTED = (ExitCode.HALTED, ExitCode.PREEMPTED)


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one agent with itself; the store takes a free port of the loopback interface."""

    def __init__(self, run_id: str) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, run_id, TIMEOUT_S)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((LOOPBACK, 0))
            self.master_port = listener.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                self.master_port,
                1,
                True,
                timedelta(seconds=TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def main(arguments: list[str]) -> int:
    for name in INTERFACE_VARIABLES:
        os.environ.setdefault(name, "lo")
    rendezvous_handler_registry.register(BACKEND, _handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `main` reports failures itself
    try:
        torchrun(["--rdzv_backend", BACKEND, "--rdzv_endpoint", LOOPBACK, *arguments])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if not codes <= set(REQUESTED):
            say(str(error), sys.stderr)
        return ExitCode.CRASH  # as torchrun; each rank's own code is in its last heartbeat
    except SignalException:  # TERM or INT, passed on to the workers, which have exited
        return ExitCode.CRASH
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
