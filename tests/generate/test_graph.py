"""Decode steps and tiles equal one pass over the sequence, replayed from a CUDA graph or run directly on a CPU."""

from __future__ import annotations

import pytest
import torch

from tamis.attention.cache import Cache
from tamis.generate.load import to_inference
from tamis.generate.sample import DecodeStep, TileReader
from tamis.model import Decoder
from tests.generate.test_sample import small_config, small_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def prompted(attention: str, device: str, batch: int, head_dim: int = 16) -> tuple[Decoder, torch.Tensor, Cache]:
    """Return a model on the device, 70 random tokens for it, and its empty cache."""
    torch.manual_seed(0)
    model = Decoder(small_config(attention, head_dim))
    to_inference(model, torch.device(device), torch.float32)
    tokens = torch.randint(0, 257, (batch, 70), generator=torch.Generator().manual_seed(0))
    return model, tokens.to(device), model.new_cache(batch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("attention", "head_dim"), [("nsa", 16), ("nsa", 8), ("dense", 16)])
def test_steps_after_a_prompt_give_the_hidden_states_of_one_pass(attention: str, head_dim: int, device: str) -> None:
    model, tokens, cache = prompted(attention, device, 2, head_dim)
    expected = model(tokens)[0]
    model.extend(tokens[:, :37], cache)
    step = DecodeStep(model, cache)
    got = torch.stack([step(column).clone() for column in tokens[:, 37:].unbind(1)], dim=1)
    torch.testing.assert_close(got, expected[:, 37:], rtol=1e-3, atol=1e-4)
    assert cache.positions_B.tolist() == cache.lengths_B.tolist() == [70, 70]
    assert (step.graph is not None) == (device == "cuda" and head_dim == 16)  # the kernels take no head dim of 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_prompt_read_by_tiles_gives_the_hidden_states_of_one_pass(attention: str, device: str) -> None:
    model, tokens, cache = prompted(attention, device, batch=1)
    expected = model(tokens)[0]
    read = TileReader(model, cache)
    for _ in range(2):  # the second time, every later tile is a replay
        cache.reset()
        ends = [15, 26, 37, 48, 59, 70]
        for start, end in zip([0, *ends], ends, strict=False):
            torch.testing.assert_close(read(tokens[:, start:end]), expected[:, end - 1], rtol=1e-3, atol=1e-4)
        assert cache.positions_B.tolist() == cache.lengths_B.tolist() == [70]
    assert (read.graph is not None) == (device == "cuda" and attention == "nsa")


def test_a_full_cache_stops_decoding_before_anything_is_written() -> None:
    model = small_model()
    cache = model.new_cache(1, max_len=4)
    step = DecodeStep(model, cache)
    for _ in range(4):
        step(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="5 tokens do not fit the cache of 4"):
        step(torch.zeros(1, dtype=torch.int64))
    assert cache.positions_B.tolist() == [4]
