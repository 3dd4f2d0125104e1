"""The NSA layer is its parts put together, and its compressed keys too are seen by distance alone."""

import math

import pytest
import torch
from torch import Tensor

from tamis.model.nsa import GATE_STATISTICS, NSALayer, gate_statistics
from tests.attention import paper
from tests.model.tiny import tiny_model

PHIS = ["nsa.phi=mlp", "nsa.phi=avg"]


def nsa_layer(*overrides: str) -> NSALayer:
    return tiny_model(*overrides).blocks[0].attention


def some_input(tokens: int = 40) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("tokens", [1, 7, 8, 40])
@pytest.mark.parametrize("phi", PHIS)
def test_the_layer_equals_its_parts(phi: str, tokens: int) -> None:
    layer, x = nsa_layer(phi), some_input(tokens)
    parts = (x @ layer.project.weight.T).view(2, tokens, 16, 8)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = parts.split([4, 2, 2, 2, 2, 2, 2], dim=2)
    place = torch.arange(tokens)
    blocks = layer.spec.compressed_blocks(tokens)
    ends = torch.tensor([4 * i + 7 for i in range(blocks)], dtype=torch.long)
    gates = torch.sigmoid(x @ layer.gate.weight.T + layer.gate.bias).view(2, tokens, 4, 3)
    mixed = paper.attention(
        layer.rotary(q, place),
        layer.rotary(layer.compress_k(k_cmp), ends),
        layer.compress_v(v_cmp),
        layer.rotary(k_sel, place),
        v_sel,
        layer.rotary(k_win, place),
        v_win,
        gates,
        layer.spec,
    )
    out, got_gates = layer(x)
    torch.testing.assert_close(out, mixed.flatten(2) @ layer.out.weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_gates, gates)


@pytest.mark.parametrize("phi", PHIS)
def test_scores_of_compressed_keys_depend_on_the_distance_alone(phi: str) -> None:
    layer = nsa_layer(phi)
    k, v = torch.randn(2, 1, 16, 2, 8, generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(1))

    def scores(first_block: int) -> Tensor:
        """Of a query 20 tokens after the first block's start, when that block is the `first_block`-th."""
        position = torch.tensor([first_block * layer.spec.d + 20])
        return torch.einsum("bqgd,bngd->gn", layer.rotary(q, position), layer.compress(k, v, first_block)[0])

    near = scores(0)
    for first_block in (1, 5, 11):
        torch.testing.assert_close(scores(first_block), near, rtol=1e-4, atol=1e-5)
    unturned = torch.einsum("bqgd,bngd->gn", q, layer.compress_k(k))
    assert not torch.allclose(near, unturned, atol=1e-2)


@pytest.mark.parametrize("phi", PHIS)
def test_compressed_values_are_not_turned(phi: str) -> None:
    layer = nsa_layer(phi)
    x = torch.randn(1, 16, 2, 8)
    assert torch.equal(layer.compress(x, x)[1], layer.compress_v(x))
    assert torch.equal(layer.compress(x, x, first_block=3)[1], layer.compress_v(x))


def test_keys_and_values_are_compressed_by_their_own_parameters() -> None:
    layer = nsa_layer()
    ours = {id(p) for p in layer.compress_k.parameters()}
    assert ours and not ours & {id(p) for p in layer.compress_v.parameters()}


def test_gate_statistics_mean_what_they_say() -> None:
    gates = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.0, 0.0], [0.2, 0.2, 0.0], [0.9, 0.9, 0.9]]).view(1, 2, 2, 3)
    statistics = dict(zip(GATE_STATISTICS, gate_statistics(gates).tolist(), strict=True))
    assert statistics["share_compressed"] == pytest.approx((1 / 3 + 1 + 1 / 2 + 1 / 3) / 4)
    assert statistics["share_selected"] == pytest.approx((1 / 3 + 0 + 1 / 2 + 1 / 3) / 4)
    assert statistics["share_window"] == pytest.approx((1 / 3 + 0 + 0 + 1 / 3) / 4)
    assert statistics["entropy"] == pytest.approx((2 * math.log(3) + 0 + math.log(2)) / 4, abs=1e-5)
    assert statistics["collapsed"] == pytest.approx(1 / 4)
