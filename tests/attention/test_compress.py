"""φ without overlapping copies equals φ with them: every block unfolded, then averaged or sent through the MLP."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tamis.attention import NSASpec
from tamis.attention.compress import LearnedCompression, MeanCompression
from tests.attention.inputs import specs

DIM = 6


def unfolded(x: Tensor, spec: NSASpec) -> Tensor:
    """[B, N, l, G, D]: block `i` holds tokens `i·d … i·d+l−1`."""
    blocks = [x[:, i * spec.d : i * spec.d + spec.l] for i in range(spec.compressed_blocks(x.shape[1]))]
    return torch.stack(blocks, dim=1) if blocks else x.new_zeros(x.shape[0], 0, spec.l, *x.shape[2:])


def learned(spec: NSASpec) -> LearnedCompression:
    phi = LearnedCompression(spec, DIM).double()
    for parameter in phi.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return phi


def plain_mlp(phi: LearnedCompression, x: Tensor) -> Tensor:
    """The MLP over each block's tokens, one after the other, each with the embedding of its offset."""
    with_offset = unfolded(x, phi.spec) + phi.place[:, None]
    return phi.out(F.silu(phi.hidden(with_offset.transpose(2, 3).flatten(3))))


def sequence(tokens: int) -> Tensor:
    return torch.randn(2, tokens, 3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@settings(max_examples=30)
@given(specs(), st.integers(1, 30))
def test_learned_compression_equals_the_mlp_over_unfolded_blocks(spec: NSASpec, tokens: int) -> None:
    phi, x = learned(spec), sequence(tokens).requires_grad_()
    got, expected = phi(x), plain_mlp(phi, x)
    assert got.shape == (2, spec.compressed_blocks(tokens), 3, DIM)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    parameters = [x, *phi.parameters()]
    gradients = [torch.autograd.grad(y.sin().sum(), parameters, materialize_grads=True) for y in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(specs(), st.integers(1, 30))
def test_mean_compression_equals_the_mean_over_unfolded_blocks(spec: NSASpec, tokens: int) -> None:
    x = sequence(tokens)
    torch.testing.assert_close(MeanCompression(spec)(x), unfolded(x, spec).mean(dim=2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("phi", [MeanCompression(NSASpec(4, 2, 4, 3, 4)), learned(NSASpec(4, 2, 4, 3, 4))])
def test_groups_are_compressed_alike_and_do_not_mix(phi: torch.nn.Module) -> None:
    x = sequence(13)
    torch.testing.assert_close(phi(x)[:, :, 1:2], phi(x[:, :, 1:2].contiguous()))
    torch.testing.assert_close(phi(x[:, :, [2, 0, 1]]), phi(x)[:, :, [2, 0, 1]])


def test_only_the_learned_compression_depends_on_the_offset_in_the_block() -> None:
    spec = NSASpec(4, 4, 4, 3, 4)
    x, swapped = sequence(4), sequence(4)[:, [1, 0, 2, 3]]
    torch.testing.assert_close(MeanCompression(spec)(x), MeanCompression(spec)(swapped), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(learned(spec)(x), learned(spec)(swapped))
