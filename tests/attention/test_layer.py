"""The NSA layer equals its parts composed, and scores of compressed keys depend only on distance."""

import pytest
import torch
from torch import Tensor

from tamis.attention.layer import NSAAttention
from tests.attention import paper
from tests.model.tiny import tiny_model

PHIS = ["nsa.phi=mlp", "nsa.phi=avg"]


def nsa_layer(*overrides: str) -> NSAAttention:
    return tiny_model(*overrides).blocks[0].attention


def some_input(tokens: int = 40) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("tokens", [1, 7, 8, 40])
@pytest.mark.parametrize("phi", PHIS)
def test_the_layer_equals_its_parts(phi: str, tokens: int) -> None:
    layer, x = nsa_layer(phi), some_input(tokens)
    parts = (x @ layer.project.weight.T).view(2, tokens, 16, 8)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = parts.split([4, 2, 2, 2, 2, 2, 2], dim=2)
    positions = torch.arange(tokens)
    blocks = layer.spec.compressed_blocks(tokens)
    ends = torch.tensor([4 * i + 7 for i in range(blocks)], dtype=torch.long)
    gates = torch.sigmoid(x @ layer.gate.weight.T + layer.gate.bias).view(2, tokens, 4, 3)
    mixed = paper.attention(
        layer.rotary(q, positions),
        layer.rotary(layer.compress_k(k_cmp), ends),
        layer.compress_v(v_cmp),
        layer.rotary(k_sel, positions),
        v_sel,
        layer.rotary(k_win, positions),
        v_win,
        gates,
        layer.spec,
    )
    out, got_gates = layer.with_gates(x)
    assert torch.equal(layer(x), out)
    torch.testing.assert_close(out, mixed.flatten(2) @ layer.out.weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_gates, gates)


@pytest.mark.parametrize("phi", PHIS)
def test_scores_of_compressed_keys_depend_only_on_distance(phi: str) -> None:
    layer = nsa_layer(phi)
    k, v = torch.randn(2, 1, 16, 2, 8, generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(1))

    def scores(first_block: int) -> Tensor:
        """Return the scores of a query 20 tokens after the start of block `first_block`."""
        position = torch.tensor([first_block * layer.spec.d + 20])
        return torch.einsum(
            "bqgd,bngd->gn", layer.rotary(q, position), layer.compress(torch.stack((k, v), 2), first_block)[0]
        )

    near = scores(0)
    for first_block in (1, 5, 11):
        torch.testing.assert_close(scores(first_block), near, rtol=1e-4, atol=1e-5)
    unrotated = torch.einsum("bqgd,bngd->gn", q, layer.compress_k(k))
    assert not torch.allclose(near, unrotated, atol=1e-2)


@pytest.mark.parametrize("phi", PHIS)
def test_compressed_values_are_not_rotated(phi: str) -> None:
    layer = nsa_layer(phi)
    x = torch.randn(1, 16, 2, 8)
    both = torch.stack((x, x), 2)
    torch.testing.assert_close(layer.compress(both)[1], layer.compress_v(x))
    torch.testing.assert_close(layer.compress(both, first_block=3)[1], layer.compress_v(x))


def test_keys_and_values_are_compressed_by_their_own_parameters() -> None:
    layer = nsa_layer()
    ours = {id(p) for p in layer.compress_k.parameters()}
    assert ours and not ours & {id(p) for p in layer.compress_v.parameters()}
