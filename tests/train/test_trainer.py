"""The trainer's verdict on its end, and its warning about repeated data."""

from types import SimpleNamespace
from typing import Any

import pytest

from tamis.config import load_config
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


@pytest.mark.parametrize(("tokens_per_pass", "warns"), [(None, False), (1000, False), (400, True)])
def test_a_run_that_reads_its_data_many_times_is_warned_before_it_starts(
    tokens_per_pass: int | None, warns: bool
) -> None:
    said: list[str] = []
    config = load_config(None, ["train.steps=10", "train.seq_len=100", "train.batch_size=2", "train.warmup_steps=1"])
    trainer: Any = SimpleNamespace(config=config, ranks=SimpleNamespace(world_size=1))
    trainer.console = SimpleNamespace(say=said.append)
    trainer.loader = SimpleNamespace(tokens_per_pass=tokens_per_pass)
    Trainer._warn_about_passes(trainer)
    assert bool(said) == warns and all("about 5 times" in line and "train.min_loss=0" in line for line in said)
