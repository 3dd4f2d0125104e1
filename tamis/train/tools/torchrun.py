"""torchrun whose stores listen on one address: loopback for one machine, the endpoint's network for several.

`torchrun` itself listens on every interface and unpickles what a client puts into its store, so anyone who reaches the
port runs code. On one machine the rendezvous here needs no pickle, and store and collectives stay on 127.0.0.1. Between
machines it is torch's own, and only the private network that the endpoint names reaches it.

python -m tamis.train.tools.torchrun --nproc_per_node 2 -m tamis.train.main --config OUT/config.yaml
python -m tamis.train.tools.torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint 10.0.0.1:29400 -m tamis.train.main …
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
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
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from tamis.config import ConfigError
from tamis.config.process import set_process_defaults
from tamis.run.files.console import say
from tamis.run.files.exit_codes import ExitCode
from tamis.train.network import bind_collectives, meeting_address, meeting_store, own_address, served_store

ONE_MACHINE, SEVERAL_MACHINES = "loopback", "one_address"  # names of the rendezvous backends
LOOPBACK = "127.0.0.1"
PORT = 29400  # torch's default
TIMEOUT = timedelta(minutes=10)
REQUESTED = (ExitCode.HALTED, ExitCode.PREEMPTED)


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one agent with itself; the store takes a free port of the loopback interface."""

    def __init__(self, run_id: str) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, run_id, TIMEOUT.seconds)

    def get_backend(self) -> str:
        return ONE_MACHINE

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = store = served_store(LOOPBACK, 0, TIMEOUT)  # a new one: restarted workers find no dead ones in it
        self.master_port = store.port
        return super().next_rendezvous()


class OneAddressRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous of several machines; its stores listen on one address."""

    def get_backend(self) -> str:
        return SEVERAL_MACHINES

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return served_store(master_addr, master_port, TIMEOUT)


def _one_machine(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def _several_machines(parameters: RendezvousParameters) -> RendezvousHandler:
    name, port = parse_rendezvous_endpoint(parameters.endpoint, PORT)
    store = meeting_store(meeting_address(name), port, TIMEOUT)
    backend = C10dRendezvousBackend(store, parameters.run_id)
    return OneAddressRendezvous.from_backend(
        parameters.run_id, store, backend, parameters.min_nodes, parameters.max_nodes, parameters.local_addr
    )


def bound_options(arguments: list[str]) -> Namespace:
    """torchrun's options with a rendezvous that listens on one address, whichever was asked for."""
    options = parse_args(arguments)
    options.standalone = False  # torch's word for a rendezvous that listens on every interface
    if int(options.nnodes.rpartition(":")[2]) == 1:
        bind_collectives(LOOPBACK)
        options.rdzv_backend, options.rdzv_endpoint = ONE_MACHINE, LOOPBACK
        return options
    if not options.rdzv_endpoint:
        raise ConfigError(
            "several machines need --rdzv_endpoint=ADDRESS:PORT, the address of one of them in their private network "
            "(docs/multi-node.md)"
        )
    meeting = meeting_address(parse_rendezvous_endpoint(options.rdzv_endpoint, PORT)[0])
    options.rdzv_backend, options.local_addr = SEVERAL_MACHINES, options.local_addr or own_address(meeting)
    bind_collectives(options.local_addr)
    # A shared store would lead restarted workers to addresses of dead ones.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return options


def main(arguments: list[str]) -> int:
    set_process_defaults()
    rendezvous_handler_registry.register(ONE_MACHINE, _one_machine)
    rendezvous_handler_registry.register(SEVERAL_MACHINES, _several_machines)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `main` reports failures itself
    try:
        run(bound_options(arguments))
    except ConfigError as error:
        say(f"error: {error}", sys.stderr)
        return ExitCode.USAGE
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
