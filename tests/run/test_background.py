import threading

import pytest

from tamis.run.background import repeated


def test_work_that_fails_is_printed_once_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    calls, enough = [], threading.Event()

    def save() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("No space left on device")
        enough.set()

    with repeated(0.001, save):
        assert enough.wait(60)
    assert capsys.readouterr().out.count("save failed and is tried again: OSError('No space left on device')") == 1
