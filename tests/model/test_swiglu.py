"""The SwiGLU layer and its kernel against plain PyTorch, value and gradient."""

import pytest
import torch
from torch.nn import functional as F

from tamis.model.swiglu import SwiGLU, _swiglu, swiglu
from tests.attention.devices import DEVICE


def plain(merged: torch.Tensor) -> torch.Tensor:
    gate, up = merged.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 1024), (2, 1030)])
def test_kernel_equals_pytorch_in_value_and_gradient(rows: int, width: int) -> None:
    merged = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(width)).to(DEVICE).requires_grad_()
    weight = torch.randn(rows, width, device=DEVICE)
    expected, measured = plain(merged), _swiglu(merged)
    assert torch.allclose(measured, expected, atol=1e-6)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), merged)
    (got,) = torch.autograd.grad((measured * weight).sum(), merged)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_leading_dimensions_are_kept() -> None:
    merged = torch.randn(2, 3, 10, device=DEVICE)
    assert torch.allclose(swiglu(merged), plain(merged), atol=1e-6)


def test_the_feed_forward_is_swiglu() -> None:
    layer, x = SwiGLU(6, 10), torch.randn(4, 6)
    gate, up = layer.gate_and_up.weight[:10], layer.gate_and_up.weight[10:]
    torch.testing.assert_close(layer(x), (F.silu(x @ gate.T) * (x @ up.T)) @ layer.down.weight.T)
