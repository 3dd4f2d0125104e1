"""The trunk's small parts against their plain statements; rotary turns each head alike and sees distance alone."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.model.layers import RMSNorm, Rotary, SwiGLU

DIM, LENGTH = 16, 4096


@pytest.fixture(scope="module")
def rotary() -> Rotary:
    return Rotary(DIM, base=10000.0, scale=1.0, length=LENGTH)


def turned(rotary: Rotary, x: Tensor, position: int) -> Tensor:
    return rotary(x.view(1, 1, 1, DIM), torch.tensor([position])).flatten()


def test_scores_depend_on_the_distance_alone(rotary: Rotary) -> None:
    q, k = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
    for distance in (0, 1, 7, 100, 1000):
        scores = [turned(rotary, q, s + distance) @ turned(rotary, k, s) for s in (0, 1, 63, 500, 3000)]
        torch.testing.assert_close(torch.stack(scores), scores[0].expand(5), rtol=0, atol=1e-5)
    near, far = (turned(rotary, q, s) @ turned(rotary, k, 0) for s in (1, 100))
    assert abs(near - far) > 1e-2  # and they do depend on it


def test_every_head_is_turned_alike(rotary: Rotary) -> None:
    head = torch.randn(1, 5, 1, DIM)
    positions = torch.tensor([3, 9, 0, 77, 4000])
    all_heads = rotary(head.expand(1, 5, 6, DIM), positions)
    assert torch.equal(all_heads, rotary(head, positions).expand(1, 5, 6, DIM))


def test_heads_stay_apart(rotary: Rotary) -> None:
    x, positions = torch.randn(2, 5, 3, DIM), torch.tensor([3, 9, 0, 77, 4000])
    alone = [rotary(x[:, :, h : h + 1], positions) for h in range(3)]
    assert torch.equal(rotary(x, positions), torch.cat(alone, dim=2))


def test_a_turn_is_the_rotation_of_pairs_by_position_times_frequency(rotary: Rotary) -> None:
    x = torch.randn(DIM, dtype=torch.float64)
    expected = torch.empty_like(x)
    for i in range(DIM // 2):
        angle = 1234 * 10000.0 ** (-2 * i / DIM)
        a, b = x[i].item(), x[i + DIM // 2].item()
        expected[i] = a * math.cos(angle) - b * math.sin(angle)
        expected[i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
    torch.testing.assert_close(turned(rotary, x.float(), 1234), expected.float(), rtol=0, atol=1e-6)


def test_angles_are_right_at_a_million_tokens() -> None:
    rotary = Rotary(4, base=10000.0, scale=1.0, length=1_000_000)
    assert rotary.cos[999_999, 0].item() == pytest.approx(math.cos(999_999), abs=1e-6)
    assert rotary.sin[999_999, 1].item() == pytest.approx(math.sin(999_999 / 100), abs=1e-6)


def test_the_scale_divides_positions(rotary: Rotary) -> None:
    scaled = Rotary(DIM, base=10000.0, scale=8.0, length=LENGTH)
    assert torch.equal(scaled.cos[::8], rotary.cos[: LENGTH // 8])


def test_the_norm_divides_by_the_root_mean_square() -> None:
    norm, x = RMSNorm(12, eps=1e-5), torch.randn(3, 7, 12)
    torch.nn.init.normal_(norm.weight)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_the_feed_forward_is_swiglu() -> None:
    layer, x = SwiGLU(6, 10), torch.randn(4, 6)
    gate, up = layer.gate_and_up.weight[:10], layer.gate_and_up.weight[10:]
    torch.testing.assert_close(layer(x), (F.silu(x @ gate.T) * (x @ up.T)) @ layer.down.weight.T)
