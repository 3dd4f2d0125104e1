"""The caches: a prompt read by tiles and continued token by token equals one pass over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.attention import select_blocks
from tamis.config import Config, build_config
from tamis.model import Decoder
from tests.attention.devices import DEVICE

TOKENS = 75
KINDS = [{"attention": "nsa"}, {"attention": "dense"}, {"layers": "window"}, {"layers": ["window", "nsa"]}]
KINDS += [{"layers": ["nsa", "dense"], "qk_norm": True, "mlp": "relu2"}]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # float32 rounding, grown by layers at three times the usual scale


def small_config(**changes: object) -> Config:
    model = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_ff": 32, "attention": "nsa"}
    nsa = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 12, "phi": "mlp"}
    for key, value in changes.items():
        (model if key in model or key.startswith(("rope", "qk_norm", "mlp")) else nsa)[key] = value
    return build_config({"model": model, "nsa": nsa, "data": {"tokenizer": "byte"}, "train": {"seq_len": TOKENS}})


def model_of(config: Config) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config).eval()
    with torch.no_grad():  # at the usual scale a fresh model hardly depends on what it attends to
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    return model


def random_tokens(batch: int = 1, count: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 257, (batch, count), generator=torch.Generator().manual_seed(seed))


def extend_by(model: Decoder, tokens: torch.Tensor, cache, tiles: list[int]) -> torch.Tensor:
    parts = tokens.split(tiles, dim=1)
    return torch.cat([model.extend(part, cache) for part in parts], dim=1)


def step_by(model: Decoder, tokens: torch.Tensor, cache) -> torch.Tensor:
    hidden = []
    for column in tokens.unbind(1):
        cache.reserve(1)
        hidden.append(model.step(column, cache))
    return torch.stack(hidden, dim=1)


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels, as on a GPU, on any device."""
    for module in ("attention.decode", "attention.cache", "model.dense"):
        monkeypatch.setattr(f"tamis.{module}.use_kernels", lambda q, kernels=None, groups=None: True)


def assert_same_caches(one, other) -> None:
    """Compare all that may still be read: rows before the length, and whole rings."""
    length = int(one.lengths_B[0])
    torch.testing.assert_close(one.positions_B, other.positions_B)
    for a, b in zip(one.layers, other.layers, strict=True):
        blocks = a.spec.compressed_blocks(length)
        torch.testing.assert_close(a.selected_BT2GD[:, :length], b.selected_BT2GD[:, :length], **CLOSE)
        torch.testing.assert_close(a.compressed_BN2GD[:, :blocks], b.compressed_BN2GD[:, :blocks], **CLOSE)
        torch.testing.assert_close(a.window.slots_BW2GD, b.window.slots_BW2GD, **CLOSE)
        torch.testing.assert_close(a.tail.slots_BW2GD, b.tail.slots_BW2GD, **CLOSE)
        torch.testing.assert_close(a.chosen_BGn, b.chosen_BGn)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("tiles", [[75], [1, 74], [7, 31, 37], [13, 13, 13, 13, 13, 10], [74, 1]])
def test_a_prompt_read_by_tiles_gives_the_hidden_states_of_one_pass(kinds: dict, tiles: list[int]) -> None:
    model, tokens = model_of(small_config(**kinds)), random_tokens(batch=2)
    expected = model(tokens)[0]
    torch.testing.assert_close(extend_by(model, tokens, model.new_cache(2), tiles), expected, **CLOSE)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("prompt", [0, 1, 3, 7, 8, 11, 12, 29, 61])
def test_tokens_decoded_one_at_a_time_give_the_hidden_states_of_one_pass(kinds: dict, prompt: int) -> None:
    model, tokens = model_of(small_config(**kinds)), random_tokens(batch=3, count=prompt + 14)
    expected, cache = model(tokens)[0], model.new_cache(3)
    if prompt:
        model.extend(tokens[:, :prompt], cache)
    torch.testing.assert_close(step_by(model, tokens[:, prompt:], cache), expected[:, prompt:], **CLOSE)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_mix_of_tiles_and_steps_leaves_the_same_caches_and_choices(data: st.DataObject) -> None:
    spec = data.draw(
        st.sampled_from([(8, 4, 8, 4, 12), (4, 4, 8, 3, 5), (12, 3, 6, 5, 1), (6, 2, 4, 3, 100), (1, 1, 1, 3, 2)])
    )
    phi = data.draw(st.sampled_from(["mlp", "avg"]))
    model = model_of(small_config(**dict(zip(("l", "d", "l_sel", "n_sel", "w"), spec, strict=True)), phi=phi))
    count = data.draw(st.integers(2, 60))
    tokens = random_tokens(batch=2, count=count, seed=count)
    whole, mixed = model.new_cache(2), model.new_cache(2)
    model.extend(tokens, whole)
    while (done := mixed.common_length()) < count:
        tile = data.draw(st.integers(1, count - done))
        if data.draw(st.booleans()):
            model.extend(tokens[:, done : done + tile], mixed)
        else:
            step_by(model, tokens[:, done : done + tile], mixed)
    assert_same_caches(mixed, whole)


def test_the_chosen_blocks_of_a_step_are_those_of_the_whole_sequence() -> None:
    model, tokens = model_of(small_config()), random_tokens()
    layer, cache = model.blocks[0].attention, model.new_cache()
    x = model.blocks[0].attention_norm(model.embedding(tokens))
    q, k_cmp, v_cmp = layer._by_branch(layer._heads(x))[:3]
    q, k_cmp = layer.rotary(q, torch.arange(TOKENS)), layer.compress(torch.stack((k_cmp, v_cmp), 2))[0]
    expected = select_blocks(q, k_cmp, layer.spec)
    assert (expected[0, -1] != torch.tensor([0, 7, 8, 9])).any()  # the scores, not position alone, decide
    for t in range(TOKENS):
        cache.reserve(1)
        model.step(tokens[:, t], cache)
        torch.testing.assert_close(cache.layers[0].chosen_BGn, expected[:, t])


@pytest.mark.parametrize("layers", ["nsa", ["nsa", "window", "dense"]], ids=str)
def test_sequences_of_different_lengths_decode_together_as_each_would_alone(layers: str | list[str]) -> None:
    model, lengths = model_of(small_config(layers=layers, n_layers=3)), [3, 26, 41]
    tokens = random_tokens(batch=3)
    cache = model.new_cache(3)
    for i, length in enumerate(lengths):
        model.extend(tokens[i : i + 1, :length], cache.row(i))
    new = torch.stack([tokens[i, length : length + 9] for i, length in enumerate(lengths)])
    together = step_by(model, new, cache)
    for i, length in enumerate(lengths):
        alone = model(tokens[i : i + 1, : length + 9])[0][:, length:]
        torch.testing.assert_close(together[i : i + 1], alone, **CLOSE)


def test_sequences_of_different_lengths_cannot_be_extended_by_one_tile() -> None:
    model = model_of(small_config())
    cache = model.new_cache(2)
    model.extend(random_tokens(count=5), cache.row(1))
    with pytest.raises(ValueError, match=r"lengths \[0, 5\] cannot be extended together"):
        model.extend(random_tokens(batch=2, count=4), cache)


def test_a_full_cache_refuses_and_does_not_change() -> None:
    model, tokens = model_of(small_config()), random_tokens()
    cache = model.new_cache(max_len=20)
    model.extend(tokens[:, :18], cache)
    with pytest.raises(ValueError, match="21 tokens do not fit the cache of 20"):
        model.extend(tokens[:, 18:21], cache)
    expected = model(tokens[:, :20])[0][:, 18:]
    torch.testing.assert_close(model.extend(tokens[:, 18:20], cache), expected, **CLOSE)


def test_a_cache_cannot_be_longer_than_the_model() -> None:
    with pytest.raises(ValueError, match="76 tokens is longer than the 75"):
        model_of(small_config()).new_cache(max_len=76)


def test_a_reset_cache_is_empty() -> None:
    model, tokens = model_of(small_config()), random_tokens()
    cache = model.new_cache()
    first = model.extend(tokens, cache)
    cache.reset()
    extend_by(model, random_tokens(seed=1), cache, [75])
    cache.reset()
    torch.testing.assert_close(extend_by(model, tokens, cache, [40, 35]), first, **CLOSE)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_reset_cache_recovers_from_nan(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(small_config(n_layers=1, attention=attention)).to(DEVICE)
    tokens = random_tokens(count=41).to(DEVICE)
    expected, cache = model(tokens)[0], model.new_cache()
    for tensor in cache.layers[0].tensors():
        tensor.fill_(float("nan"))
    cache.reset()
    through_kernels(monkeypatch)
    got = torch.cat((extend_by(model, tokens[:, :39], cache, [14, 25]), step_by(model, tokens[:, 39:], cache)), dim=1)
    torch.testing.assert_close(got, expected, **CLOSE)


def test_bytes_are_counted_from_the_tensors() -> None:
    model = model_of(small_config())
    per_token = 2 * 2 * 8 * 4  # key and value, two groups, eight dims, four bytes
    blocks = (TOKENS - 8) // 4 + 1
    assert model.new_cache(3).bytes == 3 * 2 * per_token * (TOKENS + blocks + 1 + 12 + 8)


def test_rope_scale_applies_to_every_branch_of_the_cached_path() -> None:
    tokens = random_tokens()
    plain, scaled = (model_of(small_config(rope_scale=scale)) for scale in (1.0, 8.0))
    assert not torch.allclose(plain(tokens)[0], scaled(tokens)[0], atol=1e-2)
    got = step_by(scaled, tokens, scaled.new_cache())
    torch.testing.assert_close(got, scaled(tokens)[0], **CLOSE)


def test_tiles_and_steps_through_the_kernels_give_the_hidden_states_of_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles run the training kernels from the cache's end on, then steps run the decode kernels."""
    model = model_of(small_config(n_layers=1)).to(DEVICE)
    tokens = random_tokens(batch=2, count=61, seed=2).to(DEVICE)  # with seed 0 two blocks tie, and rounding decides
    expected = model(tokens)[0]
    through_kernels(monkeypatch)
    cache = model.new_cache(2)
    tiles = extend_by(model, tokens[:, :59], cache, [5, 17, 37])
    steps = step_by(model, tokens[:, 59:], cache)
    torch.testing.assert_close(torch.cat((tiles, steps), dim=1), expected, **CLOSE)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, [1, 6, 23, 9]),
        ({"w": 100, "n_kv_groups": 1, "l": 12, "d": 3, "l_sel": 6}, [19, 2, 18]),
        ({"l": 1, "d": 1, "l_sel": 1, "n_sel": 3, "w": 1, "d_k": 6}, [3, 13]),
        ({"l": 4, "d": 4, "n_kv_groups": 4, "d_k": 20}, [30]),
        ({"phi": "avg"}, [21, 8]),
    ],
)
def test_the_kernels_leave_the_caches_that_plain_pytorch_leaves(
    attention: str, changes: dict, tiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(small_config(n_layers=1, attention=attention, rope_scale=2.0, **changes)).to(DEVICE)
    tokens = random_tokens(batch=2, count=sum(tiles) + 6).to(DEVICE)  # a compressed block ends within the steps
    plain, kernels = model.new_cache(2), model.new_cache(2)

    def read(cache):  # type: ignore[no-untyped-def]
        tiled = extend_by(model, tokens[:, : sum(tiles)], cache, tiles)
        return torch.cat((tiled, step_by(model, tokens[:, sum(tiles) :], cache)), dim=1)

    expected = read(plain)
    through_kernels(monkeypatch)
    torch.testing.assert_close(read(kernels), expected, **CLOSE)
    if attention == "nsa":
        assert_same_caches(kernels, plain)
    else:
        torch.testing.assert_close(kernels.layers[0].cached_BT2GD, plain.layers[0].cached_BT2GD, **CLOSE)


@pytest.mark.parametrize("through", ["plain", "kernels"])
def test_tiles_and_steps_write_to_the_tensors_the_cache_was_made_with(
    through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph writes to the tensors it was captured with: none may be replaced."""
    model, tokens = model_of(small_config(n_layers=1)).to(DEVICE), random_tokens(count=20).to(DEVICE)
    if through == "kernels":
        through_kernels(monkeypatch)
    cache = model.new_cache()
    layer = cache.layers[0]

    def tensors() -> list[torch.Tensor]:
        return [*layer.tensors(), layer.chosen_BGn, layer.reads_BG, cache.positions_B]

    before = tensors()
    model.extend(tokens[:, :18], cache)
    step_by(model, tokens[:, 18:], cache)
    assert all(one is other for one, other in zip(before, tensors(), strict=True))
    assert int(layer.reads_BG.min()) > 0
    assert int(layer.chosen_BGn.max()) == 2
