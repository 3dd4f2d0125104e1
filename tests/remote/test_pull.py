"""Pulled files are whole and verified, over interrupted connections, and names from a host cannot leave the target."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tamis.remote.command import main
from tamis.remote.connection import SSH_FAILED, Host
from tamis.remote.hosts import parse_hosts
from tamis.remote.pull import Receiver
from tamis.run.files.manifest import damage
from tests.run.fabricate import fabricate


def sender(run: Path, *words: str, cut_after: int | None = None) -> list[str]:
    """The host's side, without ssh; cut after so many bytes as a lost connection would."""
    command = [sys.executable, "-m", "tamis.remote.sender", str(run), *words]
    return command if cut_after is None else ["sh", "-c", f"{shlex.join(command)} | stdbuf -o0 head -c {cut_after}"]


def answering(listing: object, content: bytes = b"") -> list[str]:
    """A host that sends this, whatever is asked."""
    answer = (json.dumps(listing) + "\n").encode() + content
    code = f"import sys; sys.stdout.buffer.write({answer!r}); sys.stdout.flush(); sys.stdin.readline()"
    return [sys.executable, "-c", code]


def test_an_interrupted_pull_continues_and_every_byte_is_verified(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", steps=60)
    target = tmp_path / "pulled"
    target.mkdir()
    receiver = Receiver(target)
    assert receiver.receive(sender(run.path, "--checkpoints", "all", cut_after=20_000)) == SSH_FAILED
    parts = {path.name: path.stat().st_size for path in target.glob("*.part")}
    assert len(parts) == 1 and not list(target.glob("checkpoint_*.json"))
    assert receiver.receive(sender(run.path, "--checkpoints", "all")) == 0
    assert receiver.problems == [] and not list(target.glob("*.part"))
    for step in (20, 40, 60):
        assert damage(target / f"checkpoint_step{step}.json") is None
    assert (target / "tb" / "events.out.tfevents.1").is_file()
    fetched = receiver.fetched
    assert receiver.receive(sender(run.path, "--checkpoints", "all")) == 0
    assert (receiver.fetched, receiver.kept) == (fetched, fetched)


def test_only_the_newest_valid_checkpoint_is_pulled_unless_asked(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", steps=60)
    run.checkpoint(60).write_bytes(b"damaged")
    receiver = Receiver(tmp_path)
    assert receiver.receive(sender(run.path)) == 0
    assert [path.name for path in tmp_path.glob("checkpoint_*.pt")] == ["checkpoint_step40.pt"]


def test_a_file_with_a_wrong_sum_is_a_problem_and_never_gets_its_name(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path)
    assert receiver.receive(answering([{"name": "a.csv", "size": 3, "sha256": "0" * 64}], b"abc")) == 0
    assert receiver.problems == ["a.csv: its sha256 is not the one that the host computed"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "tb/..", ".bashrc", "a/b/c", "a\nb", ""])
def test_a_name_that_leaves_the_target_is_refused(tmp_path: Path, name: str) -> None:
    listing = [{"name": name, "size": 0, "sha256": "0" * 64}]
    with pytest.raises(ValueError, match="odd file name"):
        Receiver(tmp_path).receive(answering(listing))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "$(x)", ";x", ""])
def test_a_host_name_is_never_an_option_or_a_command(name: str) -> None:
    with pytest.raises(ValueError, match="host"):
        parse_hosts(name)
    words = Host("-oX", "it's; rm -rf /").command("exit 0")
    assert words[-2] == "-oX" and words[-3] == "--"


def test_an_unknown_verb_or_flag_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["gpu1", "dance"], ["gpu1", "pull", "--fast"], ["gpu1"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "error: " in capsys.readouterr().err
    assert main(["gpu1,gpu2", "pull"]) == 2
    assert "pull takes one host" in capsys.readouterr().err
