"""Another machine, reached over a real sshd on loopback."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loopback_ssh import LoopbackSsh


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSsh]:
    if not shutil.which("rsync"):
        pytest.skip("no rsync on this machine (Debian: rsync)")
    server = LoopbackSsh(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture
def ssh_on_path(sshd: LoopbackSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackSsh:
    """`ssh` reaches the server of this test, as it would through an entry in the user's own configuration."""
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {" ".join(sshd.options)} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    return sshd
