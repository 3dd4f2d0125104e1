"""The hosts that were set up from here and the folder used on each, kept in a file of the user's own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tamis.run.files.records import errors_naming

DEFAULT_FOLDER = "tamis"  # below the home directory there
_HOST = re.compile(r"(?!-)[\w.@:/%\[\]-]+")


def hosts_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "tamis" / "hosts.json"


def known_hosts() -> dict[str, str]:
    """Host → folder."""
    path = hosts_file()
    try:
        hosts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): mend or remove it, then set the hosts up again") from None
    if not isinstance(hosts, dict):
        raise ValueError(f"{path} holds no hosts: remove it, then set the hosts up again")
    return {str(host): str(folder) for host, folder in hosts.items()}


def folder_of(host: str) -> str:
    return known_hosts().get(host, DEFAULT_FOLDER)


def remember_host(host: str, folder: str) -> None:
    _write(known_hosts() | {host: folder})


def forget_host(host: str) -> bool:
    """Drop a host from the list; False if it was not in it."""
    hosts = known_hosts()
    if host not in hosts:
        return False
    del hosts[host]
    _write(hosts)
    return True


def parse_hosts(text: str) -> list[str]:
    """Split `HOST,HOST`; a ValueError for a name that ssh could take for an option."""
    hosts = [host for host in text.split(",") if host]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is no host: write a name of ~/.ssh/config, a host or user@host")
    if not hosts:
        raise ValueError("no host was named: tamis remote HOST VERB")
    return hosts


def _write(hosts: dict[str, str]) -> None:
    path = hosts_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with errors_naming(path):
        temporary.write_text(json.dumps(hosts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.chmod(0o600)
        temporary.replace(path)
