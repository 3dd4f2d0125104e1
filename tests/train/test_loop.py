"""An end that could not be saved is neither done nor halted."""

from types import SimpleNamespace
from typing import Any

import pytest

from tamis.run.files.exit_codes import ExitCode
from tamis.train.loop import _ended


@pytest.mark.parametrize(("phase", "code"), [("done", ExitCode.DONE), ("halted", ExitCode.PREEMPTED)])
def test_the_exit_code_tells_whether_the_last_step_is_saved(phase: Any, code: ExitCode) -> None:
    beats: list[tuple[str, int]] = []
    telemetry = SimpleNamespace(beat=lambda phase, step, exit_code, detail: beats.append((phase, exit_code)))
    saved: Any = SimpleNamespace(step=7, saved_step=7, telemetry=telemetry)
    lost: Any = SimpleNamespace(step=7, saved_step=5, telemetry=telemetry)
    assert _ended(saved, phase, code) == code
    assert _ended(lost, phase, code) == ExitCode.CRASH
    assert beats == [(phase, int(code)), ("failed", int(ExitCode.CRASH))]
