"""`setup`: send this checkout to a host, bootstrap it there, and check the machine.

Files that git tracks are sent as they are here, changed or not, and nothing else: no untracked file, no history, no
name of a user. What an earlier setup sent and this one does not is removed there; other files are never touched.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from tamis.remote.connection import (
    ACTIVE,
    Host,
    NotSetUp,
    query,
    runs_on,
    streamed,
    tamis_script,
    until_connected,
)
from tamis.remote.hosts import remember_host
from tamis.run.files.console import say

SENT, COMMIT = ".sent", ".commit"  # the list of files, and the commit that run.info names
MARK = "scripts/prime_bootstrap.sh"
PROBE = f"""
mkdir -p "$1" && cd "$1" || exit 1
[ ! -e .git ] || {{ echo "$1 is a git checkout of its own: update it there, or choose another --folder" >&2; exit 2; }}
[ -e {SENT} ] || [ -e {SENT}.old ] || [ -z "$(ls -A)" ] || {{
  echo "$1 holds other files: choose another --folder" >&2; exit 2; }}
"""
RECEIVE = f"""
set -e
[ ! -e {SENT} ] || [ -e {SENT}.old ] || mv {SENT} {SENT}.old
tar -xf -
[ ! -e {SENT}.old ] || LC_ALL=C comm -23 {SENT}.old {SENT} | tr '\\n' '\\0' | xargs -0 -r rm -f --
rm -f {SENT}.old
"""
# A bootstrap whose connection was lost may still install; the next one waits for it.
BOOTSTRAP = "exec flock .bootstrap_lock bash scripts/prime_bootstrap.sh --from-script"


def set_up(host: Host, words: list[str], quick: bool = False) -> int:
    """Send, bootstrap and check; returns the exit code of the first part that failed, else 0."""
    root = find_checkout()
    query(host, host.outside(PROBE))
    _require_idle(host)
    names, commit = tracked_files(root), described_commit(root)
    say(f"sending {len(names)} files of {root} ({commit}) …")
    if code := until_connected(host, lambda: _send(host, root, names, commit)):
        return code
    remember_host(host.name, host.folder)
    say("bootstrapping there …")
    if code := until_connected(host, lambda: streamed(host.command(BOOTSTRAP))):
        return code
    check = tamis_script("check", *words, *(["--quick"] if quick else []))
    code = until_connected(host, lambda: streamed(host.command(check)))
    if code == 0:
        say(f"ready: tamis remote {host.name} run")
    return code


def find_checkout() -> Path:
    """The checkout to send: the current directory, or the one that this package lies in."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / MARK).is_file() and (root / "tamis" / "__init__.py").is_file():
            return root
    raise ValueError("there is no checkout of Tamis here to send: run this in one (git clone), then set up again")


def tracked_files(root: Path) -> list[str]:
    """The files that git tracks and that exist."""
    names = [name for name in _git(root, "ls-files", "-z").split("\0") if name]
    return sorted(name for name in names if (root / name).is_file() and not (root / name).is_symlink())


def described_commit(root: Path) -> str:
    """The commit, and a sum of the changes that were not committed."""
    commit = _git(root, "rev-parse", "HEAD").strip()
    changes = _git(root, "diff", "HEAD")
    return f"{commit} with changes {hashlib.sha256(changes.encode()).hexdigest()[:12]}" if changes else commit


def write_archive(stream: IO[bytes], root: Path, names: list[str], commit: str) -> None:
    """Write the files as a tar without owners; the list of them comes first."""
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        listing = "".join(f"{name}\n" for name in sorted(names, key=str.encode))
        for name, text in ((SENT, listing), (COMMIT, commit + "\n")):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for name in names:
            archive.add(root / name, arcname=name, recursive=False, filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _send(host: Host, root: Path, names: list[str], commit: str) -> int:
    process = subprocess.Popen(host.command(RECEIVE), stdin=subprocess.PIPE)
    with suppress(BrokenPipeError), process:  # its exit code tells why it stopped reading
        assert process.stdin is not None
        write_archive(process.stdin, root, names, commit)
    return process.wait()


def _require_idle(host: Host) -> None:
    """A run that is restarted must find the code that it began with."""
    try:
        active = [run["run"] for run in runs_on(host) if run.get("state") in ACTIVE]
    except (NotSetUp, ValueError):
        return  # nothing there yet, or nothing that works
    if active:
        raise ValueError(
            f"{', '.join(active)} is under way on {host.name}, and a restart would take the new code: halt it first "
            f"(tamis remote {host.name} halt), or give another --folder"
        )


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise ValueError("setup asks git which files to send: install git here") from None
    if done.returncode:
        raise ValueError(f"{root} is no git checkout ({done.stderr.strip()}): git clone one and run this in it")
    return done.stdout
