"""Long work is announced, and a reminder shows that it goes on."""

import threading

import pytest

from tamis.cli import common
from tamis.cli.common import announced


def test_long_work_is_announced_and_reminders_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    third = threading.Event()

    def listen(text: str, stream: object) -> None:
        lines.append(text)
        if len(lines) >= 3:
            third.set()

    monkeypatch.setattr(common, "REMIND_EVERY_S", 0.01)
    monkeypatch.setattr(common, "say", listen)
    with announced("measuring"):
        assert third.wait(60)
    assert lines[0] == "measuring …"
    assert all(line.startswith("still measuring, ") and line.endswith(" s so far") for line in lines[1:])


def test_announcements_leave_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with announced("measuring"):
        print("{}")
    assert capsys.readouterr() == ("{}\n", "[tamis] measuring …\n")


def test_an_error_ends_the_reminders(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="no"), announced("measuring"):
        raise ValueError("no")
    assert threading.active_count() == before
