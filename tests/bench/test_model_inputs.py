"""The attention bench on a trained model: its layers' own inputs, how alike neighbours choose, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.attention.devices import DEVICE  # isort: skip
from tamis.attention import NSASpec, nsa_attention
from tamis.attention.kernels.selected import pairs, union
from tamis.bench import attention
from tamis.bench.choices import count_blocks
from tamis.bench.model_inputs import layer_inputs, load_trained, shape_of_model
from tamis.bench.positions import held_out
from tamis.config import build_config
from tests.attention.kernels.test_selected import random_ids
from tests.bench.test_positions import checkpoint
from tests.generate.test_load import save
from tests.generate.test_sample import small_model


def test_inputs_are_what_each_layer_computes_from_the_held_out_text(tmp_path: Path) -> None:
    loaded = load_trained(checkpoint(tmp_path), 40, "cpu")
    tokens = held_out(loaded.config, 40, 2)[:, :-1]
    outputs: list[torch.Tensor] = []
    for block in loaded.model.blocks:
        block.attention.out.register_forward_hook(lambda module, given, out: outputs.append(given[0]))
    loaded.model(tokens)
    layers = list(layer_inputs(loaded, 2, 40))
    assert len(layers) == len(loaded.model.blocks)
    for inputs, output in zip(layers, outputs, strict=False):
        torch.testing.assert_close(nsa_attention(*inputs, shape_of_model(loaded).spec).flatten(2), output)


def test_short_text_is_repeated_until_it_fills_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_trained(checkpoint(tmp_path), 40, "cpu")
    monkeypatch.setattr("tamis.bench.model_inputs.held_out", lambda *_: torch.arange(2 * 41).view(2, 41))
    q = next(layer_inputs(loaded, 5, 40))[0]
    assert q.shape[:2] == (5, 40)
    torch.testing.assert_close(q[4], q[0])


def test_layers_are_measured_next_to_random_inputs_of_their_shape(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(attention.branches, "parts", lambda *args: [])  # kernels, and slow in the interpreter
    document = attention.measure_attention((), (48,), 48, repeats=1, device="cpu", model=checkpoint(tmp_path))
    whole = {row["choices"]: row for row in document["rows"] if row["name"] == "whole"}
    assert set(whole) == {"random", "clustered", "trained"}
    layers = whole["trained"]["layers"]
    assert whole["trained"]["both_ms"] == pytest.approx(sum(row["both_ms"] for row in layers) / 2, abs=1e-3)
    assert all(row["chosen_blocks"] <= row["union_blocks"] <= 6 for row in whole.values())  # 48 tokens, blocks of 8
    out = capsys.readouterr().out
    assert "4 heads in 2 groups of dim 8" in out and "share of tiles that walk them as a union" in out


def test_a_mean_leaves_out_what_a_layer_lacks() -> None:
    measured = {"name": "whole", "choices": "trained", "forward_ms": 1.0, "both_ms": 3.0}
    mean = attention.mean_of_layers([measured, measured | {"forward_ms": 2.0, "both_ms": None, "error": "memory"}])
    assert mean["forward_ms"] == 1.5 and mean["both_ms"] is None and mean["layers"][1]["error"] == "memory"


def test_a_model_without_nsa_layers_or_held_out_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no NSA layer"):
        load_trained(save(tmp_path, small_model("dense")), 40, "cpu")
    tree = small_model().config.model_dump()
    tree["data"] |= {"dataset": "sample", "val_fraction": 0.0}
    with pytest.raises(ValueError, match="held out no text"):
        held_out(build_config(tree), 40, 1)


@pytest.mark.parametrize("worthwhile", [1.3, 1.9])
def test_unions_are_counted_as_the_kernel_makes_them(worthwhile: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(union, "WORTHWHILE", worthwhile)
    monkeypatch.setattr(pairs, "DENSE_UP_TO", 1)
    spec = NSASpec(l=8, d=4, l_sel=16, n_sel=5, w=24)
    ids = random_ids(spec, 2, 300, 2, torch.Generator().manual_seed(0))
    ids[:, 150:] = ids[:, 149:150]  # alike, so that their union is short
    found = count_blocks(ids, spec, tile=21)
    every = union.unite_choices(ids.to(DEVICE), spec, 21, every_tile=True)
    short = union.unite_choices(ids.to(DEVICE), spec, 21, every_tile=False)
    assert short.rest is not None
    left = torch.nn.functional.pad(short.rest.cpu(), (0, 0, 0, 0, 0, 315 - 300), value=-1)
    walked = (left.unflatten(1, (15, 21)) < 0).all(dim=4).all(dim=2)
    assert found["union_blocks"] == pytest.approx(every.counts[..., 0].float().mean().item(), abs=0.01)
    assert found["union_tiles"] == pytest.approx(walked.float().mean().item(), abs=1e-3)
    assert found["chosen_blocks"] == pytest.approx((ids >= 0).sum(dim=3).float().mean().item(), abs=0.01)
    assert 0 < found["union_tiles"] < 1
