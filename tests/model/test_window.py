"""Window layers: attention over the newest tokens alone, and patterns of layers in one model."""

import pytest
import torch
from torch.nn import functional as F

from tamis.config import ConfigError
from tamis.model.window import chunked_window_attention
from tests.model.tiny import random_tokens, tiny_config, tiny_model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "window"), [(1, 4), (7, 1), (12, 12), (13, 12), (50, 8), (50, 64), (64, 16)])
def test_window_attention_equals_attention_under_a_band_mask(tokens: int, window: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    batch = 1 if packed else 2
    q, k, v = (torch.randn(batch, tokens, heads, 6, generator=generator).requires_grad_() for heads in (4, 2, 2))
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    visible = (distance >= 0) & (distance < window)
    offsets = None
    if packed:
        offsets = torch.tensor([0, tokens // 5, tokens // 3, tokens, tokens], dtype=torch.int32)
        document = (torch.arange(tokens)[:, None] >= offsets[1:]).sum(1)
        visible &= document[:, None] == document
    expected = F.scaled_dot_product_attention(*swapped, visible, enable_gqa=True).transpose(1, 2)
    got = chunked_window_attention(q, k, v, window, offsets)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_window_over_everything_is_dense_attention() -> None:
    window, dense = tiny_model("nsa.layers=window", "nsa.w=72"), tiny_model("nsa.layers=dense")
    window.load_state_dict(dense.state_dict())
    tokens = random_tokens(2, 72)
    torch.testing.assert_close(window(tokens)[0], dense(tokens)[0])


def test_a_pattern_repeats_over_the_layers_and_only_nsa_layers_have_gates() -> None:
    model = tiny_model("nsa.layers=[nsa, window]", "model.n_layers=5")
    kinds = [type(block.attention).__name__ for block in model.blocks]
    assert kinds == ["NSAAttention", "WindowAttention"] * 2 + ["NSAAttention"]
    assert model(random_tokens(1, 20))[1].shape == (3, 5)
    assert tiny_config("nsa.layers=[nsa, window]", "model.attention=dense").layer_kinds == ["dense", "dense"]


@pytest.mark.parametrize("layers", ["window", "[nsa, window]"])
def test_every_parameter_of_a_pattern_gets_a_gradient_and_the_future_none(layers: str) -> None:
    model, tokens = tiny_model(f"nsa.layers={layers}"), random_tokens(2, 61)
    model.loss(tokens)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 257
    assert torch.equal(model(tokens)[0][:, :40], model(changed)[0][:, :40])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("sliding", "nsa.layers is 'sliding', which is none of its values .allowed: nsa, window, dense, or a list"),
        ("[]", "nsa.layers must list 1 to model.n_layers=2 layers, got 0"),
        ("[nsa, window, nsa]", "nsa.layers must list 1 to model.n_layers=2 layers, got 3"),
    ],
)
def test_a_wrong_pattern_is_refused(layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(f"nsa.layers={layers}")
