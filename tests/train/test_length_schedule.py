"""A length schedule: rows grow, tokens per step stay, and a resume anywhere repeats the same bits."""

from pathlib import Path

import numpy as np
import pytest

from tamis.checkpoint.file import read_checkpoint
from tamis.config import Config, ConfigError
from tamis.data.loader import cut_rows
from tamis.run.files.directory import RunDirectory
from tamis.train import main
from tamis.train.step import TrainStep
from tests.train.processes import tiny_config
from tests.train.test_muon import CPU
from tests.train.test_resume import assert_same_bits, tensors

SCHEDULE = ["train.seq_len=32", "train.length_schedule=[8, 16, 32]", "train.steps=6", "train.save_every=1"]


def scheduled(out: Path, *overrides: str) -> Config:
    return tiny_config(out, *SCHEDULE, "train.keep_checkpoints=0", "model.attention=dense", *overrides)


@pytest.mark.parametrize(
    ("packing", "resumed_at"), [("stream", 2), ("documents", 3)]
)  # between two lengths; within one
def test_lengths_grow_by_steps_and_a_resumed_run_is_bit_identical(
    tmp_path: Path, monkeypatch, packing: str, resumed_at: int
) -> None:
    shapes, train = [], TrainStep.__call__

    def watched(step: TrainStep, tokens: np.ndarray, *rest):
        shapes.append(tokens.shape)
        return train(step, tokens, *rest)

    monkeypatch.setattr(TrainStep, "__call__", watched)
    config = scheduled(tmp_path, f"data.packing={packing}")
    run = RunDirectory(config.train.out_dir)
    assert main.train_config(config, None) == 0
    assert shapes == [(1, 8, 9)] * 2 + [(1, 4, 17)] * 2 + [(1, 2, 33)] * 2
    saved = tensors(run, 6)
    assert read_checkpoint(run.checkpoint(6), CPU)["config"]["train"]["length_schedule"] == [8, 16, 32]
    assert main.train_config(config, str(run.checkpoint(resumed_at))) == 0
    assert shapes[6:] == shapes[resumed_at:6]
    assert_same_bits(tensors(run, 6), saved)


def test_cut_rows_keep_every_target() -> None:
    rows = np.arange(2 * 13).reshape(1, 2, 13)
    cut = cut_rows(rows, 4)
    assert cut.tolist()[0][:3] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert cut[:, :, 1:].flatten().tolist() == rows[:, :, 1:].flatten().tolist()
    assert cut_rows(rows, 12) is rows


@pytest.mark.parametrize("lengths", ["[6, 32]", "[16, 8, 32]", "[8, 16]", "[0, 32]", "[1, 2, 4, 8, 16, 32, 32]"])
def test_lengths_that_do_not_fit_are_refused(tmp_path: Path, lengths: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.length_schedule"):
        scheduled(tmp_path, f"train.length_schedule={lengths}")
