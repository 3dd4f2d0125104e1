"""Perplexity by position: counted where it should be, and changed by the scale of positions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tamis.bench.positions import loss_by_position, measure_positions
from tamis.config import build_config
from tamis.model import Decoder
from tests.generate.test_load import save
from tests.generate.test_sample import small_config, small_model


def checkpoint(folder: Path) -> Path:
    tree = small_config().model_dump()
    tree["data"] |= {"dataset": "sample", "val_fraction": 0.05}
    tree["train"] |= {"seq_len": 48, "length_schedule": [16, 48], "batch_tokens": 96}  # none of which a bench follows
    torch.manual_seed(0)
    return save(folder, Decoder(build_config(tree)))


def test_perplexity_is_given_for_each_trained_length_and_scale(tmp_path: Path, capsys) -> None:
    document = measure_positions(checkpoint(tmp_path), (1, 4), reach=2, sequences=2, device="cpu", out_dir=tmp_path)
    assert document["positions"] == ["0–47", "48–95"]
    assert set(document["perplexity"]) == {"1", "4"}
    assert document["perplexity"]["1"] != document["perplexity"]["4"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document


def test_the_mean_over_positions_is_the_model_s_own_loss() -> None:
    model = small_model()
    tokens = torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(0))
    assert math.isclose(loss_by_position(model, tokens).mean().item(), model.loss(tokens)[0].item(), rel_tol=1e-5)


def test_a_reach_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reach"):
        measure_positions(tmp_path, reach=0)
