"""The counts of parameters and FLOPs against the real model: its own parameters, and what PyTorch counts of its run."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tamis.attention import NSASpec, reference, select_blocks
from tamis.config import Config, ConfigError, load_config
from tamis.config.size import (
    dense_twin,
    flops_per_token,
    least_memory_bytes,
    mean_keys_dense,
    mean_keys_nsa,
    parameter_count,
    require_memory,
)
from tamis.model import Decoder
from tests.model.tiny import random_tokens, tiny_config, tiny_model

CONFIGS = [
    [],
    ["model.attention=dense"],
    ["nsa.phi=avg"],
    ["nsa.layers=window"],
    ["nsa.layers=[nsa, window, window, dense]", "model.n_layers=6"],
    ["data.tokenizer=byte", "model.n_layers=3", "model.dim=160"],
    ["model.n_heads=8", "model.n_kv_groups=8", "model.d_k=32", "nsa.l=16", "nsa.d=8"],
    ["model.n_kv_groups=1", "model.d_ff=100", "nsa.l=64"],
    ["model.mlp=relu2", "model.qk_norm=true", "model.logit_soft_cap=15.0"],
]
NSA = [["nsa.phi=mlp"], ["nsa.phi=avg"], ["nsa.phi=mlp", "train.seq_len=5"], ["nsa.phi=mlp", "train.seq_len=37"]]


@pytest.mark.parametrize("overrides", CONFIGS, ids=str)
def test_parameters_are_counted_as_the_model_has_them(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    with torch.device("meta"):
        model = Decoder(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_m7c_has_125_million_parameters_within_two_percent() -> None:
    assert parameter_count(Config()) == pytest.approx(125e6, rel=0.02)


def counted_flops(model: Decoder, training: bool) -> int:
    """What PyTorch counts for one sequence up to the final hidden states."""
    tokens = model.config.train.seq_len
    # The fused CPU kernel is unknown to the counter; the plain one is the same products, masked keys included.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden = model(random_tokens(1, tokens))[0]
        if training:
            hidden.sum().backward()
    return counter.get_total_flops()


def stated_flops(config: Config, training: bool) -> float:
    """Our count for one sequence, the output matrix left out."""
    output = 2 * config.vocab_size * config.model.dim * (3 if training else 1)
    return (flops_per_token(config, training) - output) * config.train.seq_len


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_dense_flops_are_what_pytorch_counts_less_the_masked_keys(training: bool) -> None:
    config = tiny_config("model.attention=dense")
    heads, tokens = 4 * 8, 72
    masked = 2 * 4 * heads * tokens * (tokens - mean_keys_dense(tokens))
    counted = counted_flops(tiny_model("model.attention=dense"), training)
    assert counted == stated_flops(config, training) + masked * (3 if training else 1)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("overrides", NSA, ids=str)
def test_nsa_flops_are_what_pytorch_counts_less_the_references_extra_work(
    overrides: list[str], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "QUERIES_AT_ONCE", {})  # one tile of queries, which then meets every key
    config = tiny_config(*overrides)
    spec = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=16)
    layers, heads, groups, dim, tokens = 2, 4 * 8, 2, 8, config.train.seq_len
    blocks = spec.compressed_blocks(tokens)
    compressed, selected, window = mean_keys_nsa(config, config.train.seq_len)
    times = 3 if training else 1
    masked = times * 4 * heads * tokens * (blocks - compressed + 2 * tokens - selected - window)
    masked_in_selection = 2 * heads * tokens * (blocks - compressed)
    sharing_out_of_scores = 2 * groups * tokens * blocks * spec.selection_blocks(tokens)
    # The first and the last piece of a sequence meet a place in a block that no block needs.
    edge_pieces = times * 2 * groups * 2 * (spec.l * dim * dim) if "nsa.phi=mlp" in overrides and blocks else 0
    padded_gates = times * 2 * tokens * config.model.dim * (-3 * config.model.n_heads % config.model.d_k)
    beyond = layers * (masked + masked_in_selection + sharing_out_of_scores + edge_pieces + padded_gates)
    assert counted_flops(tiny_model(*overrides), training) == pytest.approx(stated_flops(config, training) + beyond)


def test_the_output_matrix_counts_the_real_vocabulary() -> None:
    config, model = tiny_config("model.attention=dense"), tiny_model("model.attention=dense")
    with FlopCounterMode(display=False) as whole, sdpa_kernel(SDPBackend.MATH):
        model.logits(
            model(random_tokens(1, 72))[0]
        ).sum().backward()  # the fused loss is one op, unknown to the counter
    output = flops_per_token(config) * 72 - stated_flops(config, True)
    assert whole.get_total_flops() == counted_flops(model, True) + output


@pytest.mark.parametrize("tokens", [1, 7, 8, 40, 72])
def test_mean_keys_are_the_keys_that_queries_really_see(tokens: int) -> None:
    config, spec = tiny_config(f"train.seq_len={tokens}"), NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=16)
    ids = select_blocks(torch.randn(1, tokens, 1, 4), torch.randn(1, spec.compressed_blocks(tokens), 1, 4), spec)
    compressed = [sum(spec.last_token(i) <= t for i in range(tokens)) for t in range(tokens)]
    selected = [sum(s // 8 in ids[0, t, 0] for s in range(t + 1)) for t in range(tokens)]
    window = [sum(t - s < 16 for s in range(t + 1)) for t in range(tokens)]
    seen = [sum(keys) / tokens for keys in (compressed, selected, window)]
    assert mean_keys_nsa(config, config.train.seq_len) == pytest.approx(seen)


def test_sparse_attention_costs_less_than_dense_at_64k() -> None:
    nsa, dense = (
        flops_per_token(load_config(None, [f"model.attention={kind}", "train.seq_len=65536"]))
        for kind in ("nsa", "dense")
    )
    assert nsa < dense / 2


def test_the_flops_of_a_pattern_are_those_of_its_layers() -> None:
    def flops(layers: str, count: int, *more: str) -> float:
        return flops_per_token(load_config(None, [f"nsa.layers={layers}", f"model.n_layers={count}", *more]))

    output = 2 * flops("nsa", 1) - flops("nsa", 2)
    each = [flops(kind, 1) - output for kind in ("nsa", "window", "dense")]
    assert flops("[nsa, window, dense]", 3) == pytest.approx(sum(each) + output)
    assert flops("[nsa, window, dense]", 4) == pytest.approx(sum(each) + each[0] + output)
    assert flops("window", 1, "nsa.w=4096") == pytest.approx(flops("dense", 1))


def test_the_least_memory_is_below_what_training_takes_and_above_its_weights() -> None:
    m7c = load_config(None)
    assert 2.0e9 < least_memory_bytes(m7c) < 2.2e9  # one H200 measured more, with batch 1
    sharded = load_config(None, ["runtime.parallel=fsdp"])
    assert least_memory_bytes(sharded, 8) < least_memory_bytes(m7c) / 6


def test_a_model_larger_than_the_memory_is_refused_by_its_keys() -> None:
    require_memory(load_config(None), 24 * 2**30, "the GPU")
    huge = load_config(None, ["model.dim=65536", "model.n_layers=1000"])
    with pytest.raises(ConfigError, match=r"needs at least .* the GPU has 24\.0: lower model\.dim, model"):
        require_memory(huge, 24 * 2**30, "the GPU")


@pytest.mark.parametrize("overrides", [[], ["model.mlp=relu2"], ["nsa.phi=avg", "model.dim=512"], ["model.n_layers=2"]])
def test_the_dense_twin_has_as_many_parameters(overrides: list[str]) -> None:
    config = load_config(None, [*overrides, "train.seed=5"])
    twin = dense_twin(config)
    assert parameter_count(twin) == pytest.approx(parameter_count(config), rel=0.005)
    assert twin.model.attention == "dense" and twin.model.d_ff > config.model.d_ff and twin.model.d_ff % 8 == 0
    assert (twin.train, twin.data) == (config.train, config.data)
