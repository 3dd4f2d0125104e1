"""A real sshd on loopback with keys and a home directory of its own, and an ssh_config that reaches it under made-up
host names."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
HOSTS = "gpubox otherbox"
GONE = "gonebox"  # nothing listens there
PRIVILEGE_SEPARATION = Path("/run/sshd")  # the service makes it; sshd started by hand as root needs it too


def require_sshd() -> None:
    missing = [name for name, found in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if not found]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on this machine (Debian: openssh-server)")


class LoopbackSsh:
    """One sshd; `options` are the arguments that make ssh use it."""

    def __init__(self, folder: Path) -> None:
        require_sshd()
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir(parents=True)
        self.port, self.closed_port = _free_port(), _free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(self._server_settings())
        (folder / "ssh_config").write_text(self._client_settings())
        self.options = ["-F", str(folder / "ssh_config")]
        self._start()

    def _start(self) -> None:
        if os.geteuid() == 0:
            PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        assert SSHD is not None
        with open(self.folder / "sshd.log", "ab") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", self.folder / "sshd_config"], stderr=log)
        deadline = time.monotonic() + 60
        while subprocess.run(["ssh", *self.options, "gpubox", "true"], capture_output=True).returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                pytest.skip(f"sshd does not let this user in: {(self.folder / 'sshd.log').read_text()[-500:]}")
            time.sleep(0.1)

    def cut(self) -> int:
        """Cut every connection, as a network does: what it started stays. Returns how many there were."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        sessions = [process for process in started if process.name().startswith("sshd")]  # a user's has two processes
        for session in sessions:
            session.send_signal(signal.SIGKILL)
        return len(sessions)

    def require_terminal(self) -> None:
        """Skip where sshd, started by an ordinary user, may not give a terminal (/dev/pts mounted without a group)."""
        if subprocess.run(["ssh", *self.options, "-tt", "gpubox", "true"], capture_output=True).returncode:
            pytest.skip(f"sshd gives this user no terminal: {(self.folder / 'sshd.log').read_text()[-500:]}")

    def stop(self) -> None:
        self.cut()
        self.process.terminate()
        self.process.wait()

    def _server_settings(self) -> str:
        return f"""
ListenAddress 127.0.0.1:{self.port}
HostKey {self.folder}/host_key
AuthorizedKeysFile {self.folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
ForceCommand cd {self.home} && HOME={self.home} exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""

    def _client_settings(self) -> str:
        return f"""
Host {HOSTS}
    Port {self.port}
Host {GONE}
    Port {self.closed_port}
Host *
    HostName 127.0.0.1
    User {getpass.getuser()}
    IdentityFile {self.folder}/user_key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
