"""The optimizer step: schedule, decay, clipping, accumulation, and updates that must not happen."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tamis.config import Config, Train
from tamis.data.errors import DataError
from tamis.model import Decoder
from tamis.train.distributed import Ranks
from tamis.train.metrics import StepMetrics, unpack_step
from tamis.train.optimizer import build_optimizer, learning_rate, loss_scaler
from tamis.train.step import TrainStep
from tests.train.processes import tiny_config

CPU = torch.device("cpu")
TRAIN = Train(steps=100, warmup_steps=10, lr=1.0, lr_min_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (11, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 90))), (55, 0.55), (100, 0.1)],
)
def test_learning_rate_warms_up_then_falls_along_a_cosine(step: int, expected: float) -> None:
    assert learning_rate(step, TRAIN) == pytest.approx(expected, abs=1e-12)


def test_learning_rate_at_the_corners() -> None:
    no_warmup = TRAIN.model_copy(update={"warmup_steps": 0})
    only_warmup = TRAIN.model_copy(update={"warmup_steps": 100})
    assert learning_rate(1, no_warmup) < 1.0 and learning_rate(1, no_warmup) == pytest.approx(1.0, abs=1e-3)
    assert learning_rate(100, only_warmup) == 1.0
    assert learning_rate(101, TRAIN) == pytest.approx(0.1)  # never up again beyond the end
    assert learning_rate(1, TRAIN.model_copy(update={"steps": 1, "warmup_steps": 0})) == pytest.approx(0.1)


def test_decay_is_for_matrices_only(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "train.weight_decay=0.3")
    model = Decoder(config)
    decayed, spared = build_optimizer(model, config).param_groups
    assert decayed["weight_decay"] == 0.3 and spared["weight_decay"] == 0.0
    assert {p.dim() for p in spared["params"]} == {1}
    assert min(p.dim() for p in decayed["params"]) == 2
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


class Trainer:
    """A tiny model that takes steps on fixed tokens."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.train.seed)
        self.config = config
        self.step = TrainStep(Decoder(config), config, Ranks(0, 1, CPU))
        self.gradients: dict[str, Tensor] = {}
        self._batches = self._random_batches()

    def _random_batches(self) -> Iterator[np.ndarray]:
        draw = np.random.default_rng(0)
        while True:
            yield draw.integers(0, 257, (4, self.config.train.seq_len + 1), dtype=np.int32)

    def __call__(self, number: int) -> StepMetrics:
        """One step on four sequences, however the configuration divides them into micro-batches."""
        train = self.config.train
        tokens = next(self._batches).reshape(train.accumulate_grad_batches, train.batch_size, -1)
        return unpack_step(self.step(tokens, number).tolist(), flags=0)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.step.decoder.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        state = self.step.optimizer.state_dict()["optimizer"]
        return {f"{name}.{key}": tensor.clone() for name, of in state.items() for key, tensor in of.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tiny(tmp_path: Path, *overrides: str) -> Config:
    """The dense twin: the optimizer does not care, and half precision is not what interpreted kernels are for."""
    return tiny_config(tmp_path, "model.attention=dense", "train.batch_size=4", "train.steps=50", *overrides)


def test_accumulation_equals_one_big_batch(tmp_path: Path) -> None:
    big, small = (
        Trainer(tiny(tmp_path)),
        Trainer(tiny(tmp_path, "train.batch_size=1", "train.accumulate_grad_batches=4")),
    )
    for number in (1, 2, 3):
        a, b = big(number), small(number)
        assert a.loss == pytest.approx(b.loss, rel=1e-6) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    for name, weight in big.weights().items():
        torch.testing.assert_close(small.weights()[name], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("attention", ["dense", "nsa"])
def test_packed_documents_train_and_validate_as_if_each_were_alone(
    tmp_path: Path, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of a row, as two documents, give the loss and gradient of two rows."""
    together = Ranks.together
    kind = f"model.attention={attention}"
    packed = tiny(tmp_path, kind, "data.packing=documents", "train.batch_size=1", "train.seq_len=64")
    alone = tiny(tmp_path, kind, "train.batch_size=2", "train.seq_len=32")
    row = np.random.default_rng(0).integers(0, 256, (1, 1, 65), dtype=np.int32)
    row[0, 0, 32] = packed.vocab_size - 1  # end of text: the second document begins
    halves = np.stack([row[0, 0, :33], row[0, 0, 32:]])[None]
    first, second = Trainer(packed), Trainer(alone)
    found, expected = (
        unpack_step(trainer.step(rows, 1).tolist(), 0) for trainer, rows in ((first, row), (second, halves))
    )
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert first.step.validation_loss([row[0]]) == pytest.approx(second.step.validation_loss([halves[0]]), rel=1e-4)
    shared: list[str] = []
    monkeypatch.setattr(Ranks, "together", lambda self, action: shared.append("together") or together(self, action))
    with pytest.raises(DataError, match="a micro-batch holds 64 documents"):  # of more than there is room for
        first.step.validation_loss([np.full((1, 65), packed.vocab_size - 1, np.int32)])
    assert shared == ["together"]  # so that every rank raises it


def test_gate_statistics_average_all_micro_batches(tmp_path: Path) -> None:
    ways = (["train.batch_size=4"], ["train.batch_size=1", "train.accumulate_grad_batches=4"])
    measured = []
    for way in ways:
        trainer = Trainer(tiny(tmp_path, "model.attention=nsa", *way))
        with torch.no_grad():
            for block in trainer.step.decoder.blocks:
                block.attention.gate.weight.mul_(20)  # so that sequences differ in their gates
        measured.append(torch.tensor(trainer(1).gates))
    torch.testing.assert_close(*measured, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_gradient_norm_is_measured_before_clipping_and_clipping_respects_its_limit(
    tmp_path: Path, optimizer: str
) -> None:
    trainer = Trainer(tiny(tmp_path, "train.grad_clip=0.01", f"train.optimizer={optimizer}"))
    torch.manual_seed(0)
    norm = trainer(1).grad_norm
    train, moments = trainer.config.train, trainer.step.optimizer.state_dict()["optimizer"].values()
    # After one step the first moment is a known part of the gradient.
    applied = [m["exp_avg"] / (1 - train.beta1) for m in moments if "exp_avg" in m]
    applied += [m["momentum_buffer"] / (1 - train.muon_momentum) for m in moments if "momentum_buffer" in m]
    twin = Trainer(tiny(tmp_path))
    tokens = torch.from_numpy(next(twin._batches)).long()
    twin.step.loss(tokens)[0].backward()
    true = torch.linalg.vector_norm(
        torch.cat([p.grad.flatten() for p in twin.step.optimizer.parameters if p.grad is not None])
    )
    assert norm == pytest.approx(float(true), rel=1e-5)
    assert float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in applied]))) == pytest.approx(0.01, rel=1e-3)
    assert norm > 0.1


def nan_with_a_finite_gradient(loss: Any) -> Any:
    return lambda *inputs: (loss(*inputs)[0] + math.nan, None)


@pytest.mark.parametrize("broken", ["gradient", "loss", "data"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_non_finite_or_missing_batch_changes_no_weight_and_no_moment(
    tmp_path: Path, broken: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny(tmp_path, f"runtime.precision={precision}", "runtime.scaler_init_scale=8.0"))
    trainer(1)
    weights, moments = trainer.weights(), trainer.moments()
    if broken == "gradient":
        place = trainer.step.decoder.blocks[1].feed_forward.down.weight
        hook = place.register_hook(lambda gradient: gradient * math.inf)
        numbers = trainer(2)
        hook.remove()
        assert math.isfinite(numbers.loss)
    elif broken == "loss":
        with monkeypatch.context() as patch:
            patch.setattr(trainer.step.decoder, "loss", nan_with_a_finite_gradient(trainer.step.decoder.loss))
            numbers = trainer(2)
        assert math.isnan(numbers.loss)
    else:
        numbers = unpack_step(trainer.step(None, 2).tolist(), flags=0)
        assert numbers.lacks_data
    assert not math.isfinite(numbers.grad_norm)
    assert same_bits(weights, trainer.weights()) and same_bits(moments, trainer.moments())
    assert math.isfinite(trainer(3).grad_norm) and not same_bits(weights, trainer.weights())


def test_norm_weights_move_in_bf16_training(tmp_path: Path) -> None:
    """Steps of 1e-4 vanish when added to a bf16 1.0, whose neighbours are 0.004 away; fp32 master weights keep them."""
    trainer = Trainer(tiny(tmp_path, "runtime.precision=bf16", "train.lr=1.0e-4", "train.warmup_steps=0"))
    trainer(1)
    for name, weight in trainer.weights().items():
        if name.endswith("norm.weight"):
            assert weight.dtype == torch.float32
            moved = (weight - 1.0).abs()
            assert (moved > 0).all() and (moved < 0.004).all(), name


def test_scaler_settings_are_honoured(tmp_path: Path) -> None:
    settings = {"init_scale": 32.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
    overrides = [f"runtime.scaler_{name}={value}" for name, value in settings.items()]
    trainer = Trainer(tiny(tmp_path, "runtime.precision=fp16", *overrides))
    scaler = trainer.step.optimizer.scaler
    assert scaler.get_scale() == 32.0
    trainer(1)
    trainer(2)
    assert scaler.get_scale() == 32.0 * 4  # grown after two good steps
    trainer.step(None, 3)
    assert scaler.get_scale() == 32.0 * 4 * 0.25  # backed off after a bad one
    assert not loss_scaler(tiny(tmp_path), CPU).is_enabled()


def test_optimizer_state_is_kept_by_parameter_name(tmp_path: Path) -> None:
    trainer, other = Trainer(tiny(tmp_path)), Trainer(tiny(tmp_path, "train.seed=7"))
    trainer(1)
    other.step.decoder.load_state_dict(trainer.weights(), strict=True)
    other.step.optimizer.load_state_dict(trainer.step.optimizer.state_dict())
    other._batches = trainer._batches
    assert same_bits(trainer.moments(), other.moments())
    assert "blocks.0.attention.out.weight.exp_avg" in trainer.moments()
