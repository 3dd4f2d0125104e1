"""Checkpoints that a thread writes while training goes on: the same bits, the same reports, and none lost at an end."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.checkpoint import background
from tamis.checkpoint.background import BackgroundSave
from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.train import main, trainer
from tests.train.processes import ranks, tiny_config
from tests.train.test_resume import assert_same_bits, tensors

WAIT_S = 60.0


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "saves_in_background", lambda config, ranks: True)


def config_of(out: Path, *overrides: str) -> Config:
    return tiny_config(out, "train.steps=9", "train.save_every=3", "train.keep_checkpoints=0", *overrides)


def saving(monkeypatch: pytest.MonkeyPatch, before: Callable[[RunDirectory, int], None]) -> None:
    """Call `before` in front of every save, where the save happens."""
    save = trainer.save_checkpoint

    def patched(run: RunDirectory, state: dict[str, Any], *rest: Any) -> Path:
        before(run, state["step"])
        return save(run, state, *rest)

    monkeypatch.setattr(trainer, "save_checkpoint", patched)


def after_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> None:
    launch = trainer.Trainer.launch_step

    def patched(self: trainer.Trainer) -> None:
        launch(self)
        action(self.step)

    monkeypatch.setattr(trainer.Trainer, "launch_step", patched)


def test_training_goes_on_while_a_save_is_written_and_the_bits_are_those_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.train_config(config_of(tmp_path / "waits")) == 0
    monkeypatch.setattr(trainer, "saves_in_background", lambda config, ranks: True)
    launched = {step: threading.Event() for step in range(1, 10)}
    seen: list[tuple[int, int]] = []

    def held(run: RunDirectory, step: int) -> None:
        assert launched[min(step + 2, 9)].wait(WAIT_S), "training waits for the save"
        seen.append((step, max(run.checkpoints(), default=0)))

    saving(monkeypatch, held)
    after_step(monkeypatch, lambda step: launched[step].set())
    config = config_of(tmp_path / "background")
    capsys.readouterr()
    assert main.train_config(config) == 0
    assert seen == [(3, 0), (6, 3), (9, 6)]  # one at a time
    waited, run = RunDirectory(tmp_path / "waits"), RunDirectory(config.train.out_dir)
    for step in (3, 6, 9):
        assert_same_bits(tensors(run, step), tensors(waited, step))
    said = capsys.readouterr().out
    assert said.index("step 5/9") < said.index("step 3: saved") < said.index("step 6: saved")
    assert main.train_config(config, str(run.checkpoint(3))) == 0  # and it resumes to the same end
    assert_same_bits(tensors(run, 9), tensors(waited, 9))


def test_a_failing_save_is_reported_as_soon_as_it_is_known_and_ends_the_run_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path / "run", "train.steps=30")
    run = RunDirectory(config.train.out_dir)
    saving(monkeypatch, lambda run, step: run.checkpoint(step).mkdir(exist_ok=True))
    assert main.train_config(config) == 5
    said = capsys.readouterr().out
    assert "step 3: NO checkpoint, [Errno 21] Is a directory" in said and "move it out of the way" in said
    failures = [event["evidence"] for event in read_events(run) if event["event"] == "save_failed"]
    assert [(each["step"], each["saved_step"]) for each in failures] == [(3, 0), (6, 0), (9, 0)]
    assert [beat.step for beat in read_heartbeats(run.heartbeat(0)) if beat.save_error] == [3, 6, 9]
    assert run.anomaly.read_text().startswith("cannot_save\n9 steps are not saved, train.max_unsaved_steps is 6")


def in_background_with_a_folder_in_the_way(config: Config) -> int:
    trainer.saves_in_background = lambda config, ranks: True
    save = trainer.save_checkpoint

    def patched(run: RunDirectory, state: dict[str, Any], *rest: Any) -> Path:
        if state["step"] > 3:
            run.checkpoint(state["step"]).mkdir(exist_ok=True)
        return save(run, state, *rest)

    trainer.save_checkpoint = patched
    return main.train_config(config)


def test_all_ranks_learn_of_a_save_at_the_same_step(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "train.steps=30", "runtime.parallel=ddp")
    with ranks(tmp_path / "logs", 2, in_background_with_a_folder_in_the_way, config) as running:
        assert running.wait() == [5, 5], running.output()
    run = RunDirectory(config.train.out_dir)
    of_rank = [read_heartbeats(run.heartbeat(rank)) for rank in (0, 1)]
    failed = [[beat.step for beat in beats if beat.save_error] for beats in of_rank]
    assert failed == [[6, 9, 12]] * 2
    assert of_rank[0][-1].step == of_rank[1][-1].step
    assert latest_valid_checkpoint(run, on_damaged=lambda message: None) == 3


def test_a_save_that_is_being_written_is_finished_when_training_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = threading.Event()
    saving(monkeypatch, lambda run, step: fails.wait(WAIT_S) and None)

    def fail(step: int) -> None:
        if step == 5:
            fails.set()
            raise trainer.DataError("the disk is gone")

    after_step(monkeypatch, fail)
    config = config_of(tmp_path / "run")
    assert main.train_config(config) == 6
    said = capsys.readouterr().out
    assert said.index("step 3: saved") < said.index("Last good checkpoint: ") and "checkpoint_step3.pt" in said
    assert latest_valid_checkpoint(RunDirectory(config.train.out_dir)) == 3


def test_a_copy_takes_the_memory_of_the_one_before_and_too_little_memory_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[dict[str, Any]] = []
    saves = BackgroundSave(lambda state: written.append(state) or Path("x"))  # type: ignore[func-returns-value]
    state = {"step": 1, "model": {"w": torch.arange(6.0).view(2, 3)}, "data": {"position": [1]}}
    for step in (1, 2):
        assert saves.has_room(state)
        saves.start(state | {"step": step})
        state["model"]["w"].add_(1)
        state["data"]["position"].append(2)
        assert saves.result() == Path("x")
    first, second = written
    assert first["model"]["w"].data_ptr() == second["model"]["w"].data_ptr() != state["model"]["w"].data_ptr()
    assert second["model"]["w"].flatten()[0] == 1 and first["data"]["position"] == [1]
    assert not saves.has_ended
    monkeypatch.setattr(background.psutil, "virtual_memory", lambda: SimpleNamespace(available=40))
    assert saves.has_room(state)  # its copy is there
    assert not saves.has_room({"step": 3, "model": {"w": torch.zeros(7)}})
