"""Long work is announced, and says now and then that it still goes on."""

import threading

import pytest

from tamis.cli import waiting as cli_waiting
from tamis.cli.waiting import announced


def test_what_takes_long_is_announced_and_reminded_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    twice = threading.Event()

    def listen(text: str) -> None:
        said.append(text)
        if len(said) >= 3:
            twice.set()

    monkeypatch.setattr(cli_waiting, "REMIND_EVERY_S", 0.01)
    monkeypatch.setattr(cli_waiting, "_say", listen)
    with announced("measuring"):
        assert twice.wait(60)
    assert said[0] == "measuring …"
    assert all(line.startswith("still measuring, ") and line.endswith(" s so far") for line in said[1:])


def test_a_document_on_stdout_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    with announced("measuring"):
        print("{}")
    assert capsys.readouterr() == ("{}\n", "[tamis] measuring …\n")


def test_an_error_ends_the_reminders(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="no"), announced("measuring"):
        raise ValueError("no")
    assert threading.active_count() == before
