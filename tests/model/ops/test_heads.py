"""A merged projection cut into parts and turned, as one kernel, against plain PyTorch: values and gradients."""

import pytest
import torch

from tamis.model.layers import Rotary
from tamis.model.ops.heads import _split_heads, split_heads
from tests.attention.devices import DEVICE

PARTS = [
    ([4, 2, 2], [True, True, False]),
    ([6, 1, 1, 1, 1, 1, 1], [True, False, False, True, False, True, False]),
    ([1], [False]),
]


def problem(batch: int, length: int, dim: int, sizes: list[int]) -> tuple[torch.Tensor, Rotary]:
    generator = torch.Generator().manual_seed(length * 7 + dim)
    merged = torch.randn(batch, length, sum(sizes), dim, generator=generator).to(DEVICE).requires_grad_()
    return merged, Rotary(dim, base=10000.0, scale=1.0, length=length + 3).to(DEVICE)


def plain(merged: torch.Tensor, rotary: Rotary, sizes: list[int], turned: list[bool]) -> list[torch.Tensor]:
    positions = torch.arange(merged.shape[1], device=merged.device)
    parts = merged.split(sizes, dim=2)
    return [rotary(part, positions) if is_turned else part for part, is_turned in zip(parts, turned, strict=True)]


@pytest.mark.parametrize(("sizes", "turned"), PARTS, ids=str)
@pytest.mark.parametrize(("batch", "length", "dim"), [(2, 7, 16), (1, 33, 12), (3, 1, 2)])
def test_kernel_equals_pytorch_in_value_and_gradient(
    batch: int, length: int, dim: int, sizes: list[int], turned: list[bool]
) -> None:
    merged, rotary = problem(batch, length, dim, sizes)
    measured = _split_heads(merged, rotary.cos, rotary.sin, sizes, turned)
    expected = plain(merged, rotary, sizes, turned)
    assert all(part.is_contiguous() for part in measured)
    torch.testing.assert_close(list(measured), expected, rtol=1e-6, atol=1e-6)
    seeds = [torch.randn_like(part) for part in expected]
    got, wanted = (torch.autograd.grad(parts, merged, seeds) for parts in (measured, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_where_the_kernel_does_not_run_the_parts_are_the_same() -> None:
    merged, rotary = problem(2, 9, 8, [3, 1])
    parts = split_heads(merged, rotary.cos, rotary.sin, [3, 1], [True, False])
    torch.testing.assert_close(parts, plain(merged, rotary, [3, 1], [True, False]), rtol=1e-6, atol=1e-6)
