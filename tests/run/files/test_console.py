"""`[tamis]` lines reach the terminal, and an output that cannot take them ends nothing."""

import io
import subprocess
import sys

import pytest

from tamis.run.files.console import say

CHILD = """
import sys
from tamis.run.files.console import discard_unwritable_output, say
say("first")
say("second")
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


def test_a_full_disk_changes_neither_the_work_nor_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", CHILD], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
