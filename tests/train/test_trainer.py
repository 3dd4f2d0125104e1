"""A run whose last step could not be saved has failed."""

from types import SimpleNamespace
from typing import Any

import pytest

from tamis.run.files.exit_codes import ExitCode
from tamis.train.trainer import Trainer


@pytest.mark.parametrize(("phase", "code"), [("done", ExitCode.DONE), ("halted", ExitCode.PREEMPTED)])
def test_the_exit_code_depends_on_whether_the_last_step_is_saved(phase: Any, code: ExitCode) -> None:
    beats: list[tuple[str, int]] = []
    telemetry = SimpleNamespace(beat=lambda phase, step, exit_code, detail: beats.append((phase, exit_code)))
    saved: Any = SimpleNamespace(step=7, saved_step=7, telemetry=telemetry)
    lost: Any = SimpleNamespace(step=7, saved_step=5, telemetry=telemetry)
    assert Trainer._end(saved, phase, code) == code
    assert Trainer._end(lost, phase, code) == ExitCode.CRASH
    assert beats == [(phase, int(code)), ("failed", int(ExitCode.CRASH))]
