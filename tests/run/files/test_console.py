"""`[tamis]` lines reach the terminal, and an output that cannot take them ends nothing."""

import contextlib
import io
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tamis.cli.main import guarded
from tamis.run.files import console
from tamis.run.files.console import REWRITE, LogFilter, announced, counted, printable, say

SCREEN = f"loading\n{REWRITE}step 1{REWRITE}step 2{REWRITE}step 3\n{REWRITE}step 4\nsaved\npartial".encode()
LOG = b"loading\nstep 3\nstep 4\nsaved\npartial"
CHILD = """
import sys
from tamis.run.files.console import discard_unwritable_output, say
say("first")
say("second")
discard_unwritable_output()
sys.exit(3)
"""

CLOSED = """
import subprocess, sys
from tamis.run.files.console import discard_unwritable_output, open_closed_streams, say
open_closed_streams()
with open(sys.argv[1], "w") as file:
    file.write("mine")
    file.flush()
    say("lost")
    print("lost", file=sys.stderr)
    subprocess.run(["echo", "lost"], check=True)
discard_unwritable_output()
sys.exit(3)
"""


def test_a_line_is_written_at_once_with_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    say("step 3")
    assert capsys.readouterr().out == "[tamis] step 3\n"


def test_an_ascii_terminal_shows_question_marks_for_other_characters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    say("2 × H200", stream)
    assert raw.getvalue() == b"[tamis] 2 ? H200\n"


def test_a_command_in_a_locale_without_utf8_prints_question_marks_and_succeeds(monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    assert guarded(lambda: print("collecting …"), debug=False) == 0
    assert raw.getvalue() == b"collecting ?\n"


def test_a_full_disk_changes_neither_the_work_nor_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", CHILD], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_rewritten_lines_are_left_out_wherever_the_output_is_cut(size: int) -> None:
    log = LogFilter()
    chunks = [SCREEN[i : i + size] for i in range(0, len(SCREEN), size)]
    assert b"".join(log.feed(chunk) for chunk in chunks) == LOG


def test_an_ordinary_line_reaches_the_log_before_it_ends() -> None:
    assert LogFilter().feed(b"opening the data") == b"opening the data"


def test_output_to_closed_streams_never_lands_in_a_file_that_is_opened_later(tmp_path: Path) -> None:
    closing = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    assert subprocess.run(closing).returncode == 3
    assert (tmp_path / "file").read_text() == "mine"


def test_half_a_character_is_shown_as_an_escape() -> None:
    assert printable("\ud800 ü") == "\\ud800 ü"


def test_a_count_has_the_plural_where_it_needs_one() -> None:
    assert [counted(1, "process"), counted(2, "process"), counted(0, "log")] == ["1 process", "2 processes", "0 logs"]


def test_long_work_is_announced_and_reminders_in_a_log_say_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LOG_EVERY_S", 0.01)
    seen = ""
    with announced("measuring") as tell:
        tell("row 2 of 5")
        print("{}")  # stdout is for the results
        reached = "\n[tamis] still measuring, row 2 of 5, "  # not in the first ones, where the machine is busy
        while seen.count(reached) < 2:
            seen += capsys.readouterr().err
    first, *reminders = seen.rpartition("\n")[0].splitlines()
    assert first == "[tamis] measuring …"
    assert all(line.startswith("[tamis] still measuring, ") for line in reminders)


def test_on_a_terminal_reminders_rewrite_one_line_that_other_output_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(console, "REWRITE_EVERY_S", 0.01)
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), contextlib.redirect_stdout(terminal), announced("measuring"):
        while "still" not in terminal.getvalue():
            time.sleep(0.001)
        print("a row")
        print("begun", end="")
        unfinished = terminal.getvalue()
        time.sleep(0.05)
        assert terminal.getvalue() == unfinished  # a line that has begun is not rewritten
        print()
    assert f"{REWRITE}[tamis] still measuring, 0 s so far{REWRITE}a row\n" in terminal.getvalue()


def test_an_error_ends_the_reminders() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="no"), announced("measuring"):
        raise ValueError("no")
    assert threading.active_count() == before
