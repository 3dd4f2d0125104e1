"""The training step on a GPU: nothing waits for the device, a replayed graph is exact, repeats are bit-equal."""

import numpy as np
import pytest
import torch

from tamis.config import Config, load_config
from tamis.data.loader import cut_rows
from tamis.model import Decoder
from tamis.train.distributed import Ranks
from tamis.train.step import TrainStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = ["model.dim=256", "model.n_layers=2", "model.n_heads=6", "model.d_k=64", "model.d_ff=512", "train.seq_len=1100"]


def config(*overrides: str) -> Config:
    return load_config(None, [*SMALL, "train.batch_size=2", "train.accumulate_grad_batches=2", *overrides])


def train_step(of: Config) -> TrainStep:
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    return TrainStep(Decoder(of).to(device), of, Ranks(0, 1, device))


def batch(of: Config, seed: int) -> np.ndarray:
    shape = (2, of.train.batch_size, of.train.seq_len + 1)
    return np.random.default_rng(seed).integers(of.vocab_size, size=shape, dtype=np.int32)


def trained(of: Config, steps: int = 3) -> dict[str, torch.Tensor]:
    step = train_step(of)
    for number in range(1, steps + 1):
        step(batch(of, number), number)
    return {name: value.clone() for name, value in step.decoder.state_dict().items()}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("graph", ["true", "false"])
def test_no_step_waits_for_the_device(attention: str, graph: str) -> None:
    of = config(f"model.attention={attention}", f"runtime.cuda_graph={graph}")
    step = train_step(of)
    for number in (1, 2, 3):  # compilation and capture may wait
        step(batch(of, number), number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batch(of, 4), 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_graph_trains_the_same_weights_bit_for_bit() -> None:
    replayed, plain = trained(config()), trained(config("runtime.cuda_graph=false"))
    assert all(torch.equal(replayed[name], plain[name]) for name in plain)


def test_a_graph_is_captured_again_when_the_length_grows() -> None:
    def trained_at_two_lengths(of: Config) -> dict[str, torch.Tensor]:
        step = train_step(of)
        for number in range(1, 7):
            rows = batch(of, number)
            step(cut_rows(rows, of.train.seq_len // 2) if number <= 3 else rows, number)
        return step.decoder.state_dict()

    replayed, plain = trained_at_two_lengths(config()), trained_at_two_lengths(config("runtime.cuda_graph=false"))
    assert all(torch.equal(replayed[name], plain[name]) for name in plain)


def test_the_same_steps_give_the_same_bits() -> None:
    first, second = trained(config()), trained(config())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_fp16_with_loss_scaling_and_fp32_train() -> None:
    for precision in ("fp16", "fp32"):
        step = train_step(config(f"runtime.precision={precision}"))
        before = step.decoder.norm.weight.detach().clone()  # with its graph it would bind the weight to this stream
        for number in (1, 2):
            step(batch(step.config, number), number)
        assert not torch.equal(step.decoder.norm.weight, before)
