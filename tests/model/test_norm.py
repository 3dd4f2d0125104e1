"""RMS norm against its formula, and the kernel fused with the residual addition against plain PyTorch."""

import pytest
import torch

from tamis.model.norm import RMSNorm, add_and_norm
from tests.attention.devices import DEVICE

EPS = 1e-5


def problem(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, RMSNorm]:
    generator = torch.Generator().manual_seed(rows * 7 + dim)
    x, branch = (torch.randn(rows, dim, generator=generator).to(DEVICE).requires_grad_() for _ in range(2))
    norm = RMSNorm(dim, EPS).to(DEVICE)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(dim, generator=generator))
    return x, branch, norm


@pytest.mark.parametrize("sum_is_used", [True, False])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (5, 7), (40, 96), (3, 1100)])
def test_kernel_equals_pytorch_in_value_and_gradient(rows: int, dim: int, sum_is_used: bool) -> None:
    x, branch, norm = problem(rows, dim)
    d_total, d_normed = torch.randn(2, rows, dim, device=DEVICE)
    expected = (x + branch, norm(x + branch))
    measured = add_and_norm(x, branch, norm.weight, EPS)
    torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-5)
    used, seeds = (slice(None), [d_total, d_normed]) if sum_is_used else (slice(1, None), [d_normed])
    got, wanted = (torch.autograd.grad(of[used], [x, branch, norm.weight], seeds) for of in (measured, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_norm_is_computed_from_the_rounded_sum() -> None:
    x, branch, norm = problem(6, 32)
    total, normed = norm.of_sum(x.bfloat16(), branch.bfloat16())
    assert total.dtype == normed.dtype == torch.bfloat16
    assert torch.equal(total, x.bfloat16() + branch.bfloat16())
    torch.testing.assert_close(normed, norm(total), rtol=1e-2, atol=1e-2)


def test_leading_dimensions_are_kept() -> None:
    x, branch, norm = problem(12, 8)
    total, normed = add_and_norm(x.view(3, 4, 8), branch.view(3, 4, 8), norm.weight, EPS)
    assert total.shape == normed.shape == (3, 4, 8)


def test_the_norm_divides_by_the_root_mean_square() -> None:
    norm, x = RMSNorm(12, eps=1e-5), torch.randn(3, 7, 12)
    torch.nn.init.normal_(norm.weight)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
