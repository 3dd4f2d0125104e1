"""What the NSA layers of a trained model compute on held-out text, as inputs for `tamis bench attention`.

The kernels are faster the more neighbouring queries choose alike, and random inputs do not show how much they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tamis.attention import NSASpec
from tamis.bench.branches import Shape
from tamis.bench.positions import held_out
from tamis.generate.load import LoadedModel, load_model


def load_trained(checkpoint: str | Path, longest: int, device: str) -> LoadedModel:
    """Load a model for sequences of up to `longest` tokens; refuse one without NSA layers."""
    loaded = load_model(checkpoint, max_len=longest, device=device)
    layers, trained = loaded.config.layer_kinds.count("nsa"), loaded.config.train.seq_len
    if not layers:
        raise ValueError(f"{loaded.source} has no NSA layer: name a model that was trained with model.attention=nsa")
    print(f"{loaded.source}: step {loaded.step}, trained on {trained:,} tokens; {layers} NSA layers, held-out text")
    if longest > trained:
        print(f"beyond {trained:,} tokens it chooses at positions that it was not trained on")
    return loaded


def shape_of_model(loaded: LoadedModel) -> Shape:
    model = loaded.config.model
    return Shape(model.name, model.n_heads, model.n_kv_groups, model.d_k, NSASpec.of(loaded.config.nsa))


def layer_inputs(loaded: LoadedModel, batch: int, length: int) -> Iterator[list[Tensor]]:
    """The tensor arguments of `nsa_attention` in each NSA layer, for `batch` sequences of held-out text.

    Held-out text that is too short for so many is repeated.
    """
    tokens = held_out(loaded.config, length, batch)[:, :-1]
    tokens = tokens.repeat(-(-batch // len(tokens)), 1)[:batch].to(loaded.model.embedding.weight.device)
    for layer, normed in loaded.model.nsa_layers(tokens):
        yield [x.detach().requires_grad_() for x in layer.attention_inputs(normed)]
