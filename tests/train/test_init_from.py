"""A run may start from the weights of another: at step 0, with a fresh optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.checkpoint.convert import convert_checkpoint
from tamis.checkpoint.file import read_checkpoint
from tamis.config import Config, ConfigError
from tamis.generate.export import export_command
from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tamis.train.trainer import Trainer
from tests.train.processes import run_ranks, tiny_config, train_rank


def start_from(config: Config, path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights of a new model that starts from `path`, and what is printed."""
    said: list[str] = []
    trainer: Any = SimpleNamespace(config=config, console=SimpleNamespace(say=said.append))
    decoder = Decoder(config)
    Trainer._start_from(trainer, decoder, str(path))
    return decoder.state_dict(), said


def test_a_run_starts_from_the_weights_of_another_however_they_are_kept(tmp_path: Path) -> None:
    first = tiny_config(tmp_path / "first", "train.steps=2", "train.save_every=2")
    run_ranks(tmp_path / "ranks", 1, train_rank, first)
    checkpoint = RunDirectory(first.train.out_dir).checkpoint(2)
    trained = read_checkpoint(checkpoint, torch.device("cpu"))
    plain = convert_checkpoint(checkpoint, tmp_path / "weights.safetensors", "safetensors", None)
    exported = export_command(checkpoint, tmp_path / "exported")
    for source in (checkpoint, checkpoint.parent, Path(plain), exported):
        weights, said = start_from(first, source)
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained["model"].items()), source
        assert "step 2" in said[0]

    second = tiny_config(tmp_path / "second", "train.steps=1", "train.lr=1e-30", f"train.init_from={checkpoint}")
    output = run_ranks(tmp_path / "more", 1, train_rank, second)
    assert f"weights from {checkpoint}, step 2" in output
    state = read_checkpoint(RunDirectory(second.train.out_dir).checkpoint(1), torch.device("cpu"))
    assert state["step"] == 1
    for name, tensor in trained["model"].items():
        torch.testing.assert_close(state["model"][name], tensor)


def test_weights_that_do_not_fit_or_exist_are_refused_with_the_tensor_or_the_key(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    with pytest.raises(ConfigError, match=r"train\.init_from: .*foreign"):
        start_from(config, tmp_path / "foreign.pt")
    with pytest.raises(ConfigError, match=r"train\.init_from: .* does not exist"):
        start_from(config, tmp_path / "gone")
    from tests.generate.test_load import save

    other = Decoder(tiny_config(tmp_path, f"model.dim={config.model.dim * 2}"))
    with pytest.raises(ConfigError, match=r"do not fit this model: \S+ has shape \(.*model\.\* and nsa\.\* keys"):
        start_from(config, save(tmp_path / "other", other))
