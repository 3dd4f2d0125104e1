"""A laptop with a checkout and no packages, and a host that it reaches through a real sshd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.loopback_ssh import LoopbackSsh

SENT_FOLDERS = ("tamis", "scripts", "configs")
# Installing takes minutes and is tested elsewhere. The trainer is the one without a model, under a real supervisor.
BOOTSTRAP = f"""
echo "[bootstrap] $1"
mkdir -p .venv/bin
cat >.venv/bin/python <<'WRAPPER'
#!/bin/sh
export PYTHONPATH="{ROOT}" FAKE_HOLD=12 OMP_NUM_THREADS=1
case "$*" in
  "-u -m tamis run "*)
    mkdir -p artifacts/tiny artifacts/other
    printf %s "$TAMIS_NOTIFY" >notify_of_the_run
    exec "{sys.executable}" -u -m tests.faults.launched "$5" 1 detach ;;
esac
exec "{sys.executable}" "$@"
WRAPPER
cat >.venv/bin/tensorboard <<'STAND_IN'
#!/bin/sh
[ "$1 $3 $4 $5" = "--logdir --host 127.0.0.1 --port" ] || exit 2
exec "{sys.executable}" -m http.server "$6" --bind "$4" --directory "$2"
STAND_IN
chmod +x .venv/bin/python .venv/bin/tensorboard
"""


def _take_sigint() -> None:
    """A program that a script runs in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Laptop:
    """Types `tamis remote` with a Python that sees no installed package."""

    def __init__(self, folder: Path, ssh: LoopbackSsh) -> None:
        self.checkout, self.ssh, self.host_folder = folder / "laptop", ssh, folder / "host" / "tamis"
        self.host_folder.parent.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "*.parquet")
        for name in SENT_FOLDERS:
            shutil.copytree(ROOT / name, self.checkout / name, ignore=ignored)
        (self.checkout / "scripts" / "prime_bootstrap.sh").write_text(BOOTSTRAP)
        (self.checkout / "old.txt").write_text("sent by the first setup only")
        self.git("init", "-q")
        self.commit()
        (self.checkout / ".env").write_text("TOKEN=not-for-others")
        program = " ".join(["ssh", *ssh.options])
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "settings"), "TAMIS_SSH": program}

    def git(self, *words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *words], cwd=self.checkout, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", *SENT_FOLDERS, "old.txt")
        self.git("commit", "-q", "-m", "state")

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-m", "tamis", "remote", *words]
        return subprocess.Popen(
            command,
            cwd=self.checkout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_take_sigint,
        )

    def types(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """One laptop and one host for a whole module: its tests follow a run from setup to forget, in order."""
    if shutil.which("git") is None:
        pytest.skip("no git on this machine, which setup asks for the files to send")
    folder = tmp_path_factory.mktemp("remote")
    ssh = LoopbackSsh(folder / "ssh")
    yield Laptop(folder, ssh)
    ssh.stop()
