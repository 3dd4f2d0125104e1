"""Parameter count, FLOPs per token and least memory, from the configuration alone. No torch.

A matrix product of `[m,k]` by `[k,n]` counts 2·m·k·n; backward counts twice forward. Tests hold both counts to the
model's own.
"""

from __future__ import annotations

import math

from tamis.config.schema import Config
from tamis.config.yaml_file import ConfigError

GIB = 2**30
CHECKPOINT_BYTES_PER_PARAMETER = 12  # fp32 weight and the two fp32 moments of AdamW
TRAINING_BYTES_PER_PARAMETER = 16  # those, and the fp32 gradient
PARAMETERS_ALIKE = 0.005  # two models of equal size differ by no more than this share


RANDOM_TOKENS_MARGIN = 0.1  # nats below ln V that the loss of a batch of random tokens may reach by chance


def random_token_floor(config: Config, margin: float = RANDOM_TOKENS_MARGIN) -> float:
    """Return the loss that no model goes below on uniform random tokens unless the target leaks into the input."""
    return math.log(config.vocab_size) - margin


def least_memory_bytes(config: Config, world_size: int = 1) -> int:
    """A lower bound of what one process needs to train: weights, gradients, moments, and each layer's input."""
    shards = world_size if config.runtime.parallel == "fsdp" else 1
    tokens = config.train.batch_size * config.train.seq_len
    bytes_per_value = 4 if config.runtime.precision == "fp32" else 2
    layer_inputs = config.model.n_layers * tokens * config.model.dim * bytes_per_value
    return parameter_count(config) * TRAINING_BYTES_PER_PARAMETER // shards + layer_inputs


def require_memory(config: Config, available_bytes: int, where: str, world_size: int = 1) -> None:
    """Refuse a model that cannot fit, before it is built; `where` names the memory, as "the GPU"."""
    needed = least_memory_bytes(config, world_size)
    if needed > available_bytes:
        raise ConfigError(
            f"{config.model.name} with {parameter_count(config):,} parameters needs at least {needed / GIB:,.1f} GiB "
            f"to train, and {where} has {available_bytes / GIB:,.1f}: lower model.dim, model.n_layers, model.d_ff, "
            "train.batch_size or train.seq_len"
        )


def parameter_count(config: Config) -> int:
    """Parameters the optimizer steps, padding of the vocabulary included."""
    model = config.model
    norms = 2 * model.dim
    feed_forward = _feed_forward_parameters(config)
    attention = sum(attention_parameters(config, kind) for kind in config.layer_kinds)
    return config.padded_vocab_size * model.dim + attention + model.n_layers * (feed_forward + norms) + model.dim


def _feed_forward_parameters(config: Config) -> int:
    matrices = 3 if config.model.mlp == "swiglu" else 2
    return matrices * config.model.dim * config.model.d_ff


def dense_twin(config: Config) -> Config:
    """Return the same run with dense attention, and the feed-forward width whose parameter count is nearest."""
    dense = config.model_copy(update={"model": config.model.model_copy(update={"attention": "dense"})})
    missing = parameter_count(config) - parameter_count(dense)
    per_unit = config.model.n_layers * _feed_forward_parameters(config) // config.model.d_ff
    wider = missing / per_unit
    step = 8 if 8 * per_unit < PARAMETERS_ALIKE * parameter_count(config) else 1
    width = max(1, config.model.d_ff + round(wider / step) * step)  # a multiple of 8 suits tensor cores
    return config.model_copy(update={"model": dense.model.model_copy(update={"d_ff": width})})


def attention_parameters(config: Config, kind: str) -> int:
    """Parameters of one attention layer."""
    model = config.model
    queries_and_output = 2 * model.dim * model.n_heads * model.d_k
    key_or_value = model.dim * model.n_kv_groups * model.d_k
    if kind != "nsa":
        return queries_and_output + 2 * key_or_value
    gates = (model.dim + 1) * model.n_heads * 3
    return queries_and_output + 6 * key_or_value + gates + 2 * _phi_parameters(config)


def _phi_parameters(config: Config) -> int:
    """The learned compression of one of keys or values: position embedding and two matrices with biases."""
    if config.nsa.phi == "avg":
        return 0
    block, dim = config.nsa.l * config.model.d_k, config.model.d_k
    return block + block * dim + dim + dim * dim + dim


def flops_per_token(config: Config, training: bool = True, length: int | None = None) -> float:
    """Mean over the positions of sequences of `length` tokens; masked keys and padding are not counted.

    By default it is the mean over the run: of `train.length_schedule`, whose lengths get equally many tokens, or of
    `train.seq_len`. Packed documents are shorter and need fewer.
    """
    lengths = [length] if length else config.train.length_schedule or [config.train.seq_len]
    return sum(_flops_at(config, tokens, training) for tokens in lengths) / len(lengths)


def _flops_at(config: Config, tokens: int, training: bool) -> float:
    model, kinds = config.model, config.layer_kinds
    costs = {kind: _attention_flops(config, kind, tokens) for kind in set(kinds)}
    matrices = model.n_layers * _feed_forward_parameters(config) + config.vocab_size * model.dim
    forward = 2.0 * matrices + sum(costs[kind][0] for kind in kinds)
    scoring = sum(costs[kind][1] for kind in kinds)
    return (3.0 if training else 1.0) * forward + scoring


def _attention_flops(config: Config, kind: str, tokens: int) -> tuple[float, float]:
    """Forward FLOPs per token of one attention layer, and those of scoring blocks, which has no backward."""
    model = config.model
    heads = model.n_heads * model.d_k
    keys_and_values = 6 if kind == "nsa" else 2
    projections = 2 * model.dim * heads + keys_and_values * model.dim * model.n_kv_groups * model.d_k
    if kind == "dense":
        return 2.0 * projections + 4.0 * heads * mean_keys_dense(tokens), 0.0
    compressed, selected, window = mean_keys_nsa(config, tokens)
    if kind == "window":
        return 2.0 * projections + 4.0 * heads * window, 0.0
    projections += model.dim * model.n_heads * 3
    keys = compressed + selected + window
    return 2.0 * projections + 4.0 * heads * keys + _phi_flops(config, tokens), 2.0 * heads * compressed


def _phi_flops(config: Config, tokens: int) -> float:
    """Per token and layer: each block of keys, and of values, goes through the MLP once per group."""
    nsa, dim = config.nsa, config.model.d_k
    if nsa.phi == "avg" or tokens < nsa.l:
        return 0.0
    blocks = (tokens - nsa.l) // nsa.d + 1
    per_block = 2.0 * (nsa.l * dim * dim + dim * dim)
    return 2.0 * config.model.n_kv_groups * per_block * blocks / tokens


def mean_keys_dense(tokens: int) -> float:
    return (tokens + 1) / 2


def mean_keys_nsa(config: Config, tokens: int) -> tuple[float, float, float]:
    """Keys a query reads on average in each branch: compressed, selected, window."""
    nsa = config.nsa
    compressed = _visible_blocks(tokens, nsa.l, nsa.d)
    selected = _selected_keys(tokens, nsa.l_sel, nsa.n_sel)
    full = max(0, tokens - nsa.w)  # queries whose window is full
    window = _triangle(tokens - full) + full * nsa.w
    return compressed / tokens, selected / tokens, window / tokens


def _triangle(count: int) -> int:
    """1 + 2 + … + count."""
    return count * (count + 1) // 2


def _visible_blocks(tokens: int, l: int, d: int) -> int:  # noqa: E741
    """Compressed blocks that all queries see together: query t sees (t + 1 − l)//d + 1."""
    whole, rest = divmod(max(0, tokens - l + 1), d)
    return d * _triangle(whole) + rest * (whole + 1)


def _selected_keys(tokens: int, l_sel: int, n_sel: int) -> int:
    """Keys of the selected branch over all queries: at most n_sel − 1 whole earlier blocks, and the query's own."""
    blocks, rest = divmod(tokens, l_sel)
    growing = min(blocks, n_sel)  # the first blocks, which have fewer than n_sel − 1 blocks before them
    before = _triangle(growing - 1) + (blocks - growing) * (n_sel - 1)
    own = blocks * _triangle(l_sel) + _triangle(rest)
    return before * l_sel * l_sel + rest * min(blocks, n_sel - 1) * l_sel + own
