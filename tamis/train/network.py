"""Where the processes of a run meet: stores that listen on one address, never on every interface."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address

import psutil
from torch.distributed import TCPStore

from tamis.config import ConfigError

PUBLIC_NETWORK_VARIABLE = "TAMIS_PUBLIC_NETWORK"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # of the collectives' own sockets
SERVED_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)  # on another machine, by another process here


def served_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that this process serves on `address` alone; port 0 takes a free one."""
    listener = socket.create_server((address, port), family=_family(address))
    port = listener.getsockname()[1]
    return TCPStore(address, port, 1, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def meeting_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """The store where machines meet: served by the first process that may listen on `address`, a client elsewhere."""
    try:
        return served_store(address, port, timeout)
    except OSError as error:
        if error.errno not in SERVED_ELSEWHERE:
            raise
        return TCPStore(address, port, is_master=False, timeout=timeout)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET


def group_store(environment: Mapping[str, str], timeout: timedelta) -> TCPStore | None:
    """The store of the process group if torchrun left it to rank 0, on an address given as a number; else None.

    torch's own listens on every interface. A name is left to torch: machines may resolve it differently.
    """
    address, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", 0))
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "False" or not _is_number(address):
        return None
    if environment["RANK"] == "0":
        return served_store(address, port, timeout)
    return TCPStore(address, port, is_master=False, timeout=timeout)


def require_private_address(name: str) -> list[str]:
    """The addresses of `name`. A public one is refused: a store trusts everyone who reaches its port."""
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError:
        return []  # the connection gives the reason
    public = [address for address in addresses if ip_address(address.partition("%")[0]).is_global]
    if public and os.environ.get(PUBLIC_NETWORK_VARIABLE) != "1":
        raise ConfigError(
            f"the machines meet at {name} ({public[0]}), a public address, and everyone who reaches that port can run "
            "code here: use a private network or a VPN (docs/multi-node.md), or set "
            f"{PUBLIC_NETWORK_VARIABLE}=1 where a firewall admits these machines alone"
        )
    return addresses


def meeting_address(name: str) -> str:
    """The private address of `name`, where several machines meet; a ConfigError if others cannot reach it."""
    addresses = require_private_address(name)
    if not addresses:
        raise ConfigError(f"--rdzv-endpoint: {name} has no address here; give the number, as in 10.0.0.1:29400")
    if not _is_number(name) and ip_address(addresses[0]).is_loopback:
        raise ConfigError(
            f"--rdzv-endpoint: {name} is {addresses[0]} on this machine (/etc/hosts), which no other machine reaches: "
            "give its address in the private network, as in 10.0.0.1:29400"
        )
    return addresses[0]


def own_address(peer: str) -> str:
    """The address of this machine from which `peer` is reached. No packet is sent."""
    with socket.socket(_family(peer), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise ConfigError(f"--rdzv-endpoint: {peer} cannot be reached from here: {error.strerror}") from None
        return str(probe.getsockname()[0])


def bind_collectives(address: str) -> None:
    """Keep the sockets of gloo and NCCL on the interface with this address, unless the operator named another."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)


def _is_number(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
