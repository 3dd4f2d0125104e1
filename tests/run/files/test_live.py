"""The log of a run on a terminal reads like the log of one without."""

import pytest

from tamis.run.files.live import REWRITE, LogFilter

SCREEN = f"loading\n{REWRITE}step 1{REWRITE}step 2{REWRITE}step 3\n{REWRITE}step 4\nsaved\npartial".encode()
LOG = b"loading\nstep 3\nstep 4\nsaved\npartial"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_rewritten_lines_are_left_out_wherever_the_output_is_cut(size: int) -> None:
    log = LogFilter()
    chunks = [SCREEN[i : i + size] for i in range(0, len(SCREEN), size)]
    assert b"".join(log.feed(chunk) for chunk in chunks) == LOG


def test_an_ordinary_line_reaches_the_log_before_it_ends() -> None:
    assert LogFilter().feed(b"opening the data") == b"opening the data"
