"""Loads a trained model from a checkpoint, a run directory or an exported folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tamis.attention.layer import NSAAttention
from tamis.attention.verify import require_decode
from tamis.checkpoint.weights import EXPORTED_CONFIG, EXPORTED_TOKENIZER, load_weights, read_weights
from tamis.config import VOCABULARY, Config, build_config
from tamis.data.tokenizer import Tokenizer, tokenizer_for
from tamis.model import DTYPES, Decoder


class LanguageModel(nn.Module):
    """A trained decoder: `model(ids)` returns the logits `[B,S,V]` of token ids `[B,S]`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor | np.ndarray) -> Tensor:
        ids_BS = torch.as_tensor(ids).to(self.decoder.embedding.weight.device, torch.long)
        if ids_BS.dim() != 2:
            raise ValueError(f"ids must have 2 dimensions [batch, tokens], got {list(ids_BS.shape)}")
        hidden, _ = self.decoder(ids_BS)
        return self.decoder.logits(hidden)


@dataclass(frozen=True)
class LoadedModel:
    model: Decoder
    config: Config
    tokenizer: Tokenizer
    step: int
    source: Path


def load_model(
    path: str | Path,
    *,
    expected: Config | None = None,
    max_len: int | None = None,
    rope_scale: float | None = None,
    device: str = "auto",
    precision: str | None = None,
) -> LoadedModel:
    """Return the model in `path`, or raise a ValueError that names what to change.

    Args:
        expected: refuse a model of another configuration.
        max_len: longest sequence, by default the trained one.
        rope_scale: divides positions, instead of the trained value.
        precision: bf16, fp16 or fp32; by default bf16 on a GPU and fp32 on a CPU.
    """
    source, weights, tree, step = read_weights(Path(path))
    config = build_config(tree)
    if expected is not None:
        require_same_config(source, config, expected)
    if rope_scale is not None:
        config = build_config({**tree, "model": {**tree["model"], "rope_scale": float(rope_scale)}})
    model = Decoder(config, max_len=max_len)
    load_weights(model, weights, source, "it does not hold the model its config describes")
    target = device_for(device)
    to_inference(model, target, precision_for(target, precision))
    return LoadedModel(model, config, _tokenizer_of(config, source), step, source)


def _tokenizer_of(config: Config, source: Path) -> Tokenizer:
    """The tokenizer that the run or the export keeps next to the weights; else the one that the config names."""
    folder = source if (source / EXPORTED_CONFIG).exists() else source.parent
    kept = sorted(folder.glob("tokenizer-*")) + sorted(folder.glob(EXPORTED_TOKENIZER))
    is_built_in = config.data.tokenizer in VOCABULARY
    return tokenizer_for(config.data.tokenizer if is_built_in or not kept else str(kept[0]))


def to_inference(model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
    """Move the model to the device with weights in `dtype`; rotary tables stay in float32, as long contexts need.

    On a GPU, verify the kernels against the reference first.
    """
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to(device)
    layer = next((module for module in model.modules() if isinstance(module, NSAAttention)), None)
    if device.type == "cuda" and layer is not None:
        require_decode(device, dtype, layer.heads, layer.groups, layer.dim, layer.spec)


def device_for(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU: use --device cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    return torch.device(name)


def precision_for(device: torch.device, name: str | None) -> torch.dtype:
    name = name or ("bf16" if device.type == "cuda" else "fp32")
    if name not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def require_same_config(source: Path, found: Config, expected: Config) -> None:
    """Refuse if a key that changes the meaning of the weights differs."""
    pairs = {
        f"{section}.{key}": (value, getattr(getattr(expected, section), key))
        for section in ("model", "nsa")
        for key, value in getattr(found, section).model_dump().items()
        if key != "name"
    }
    pairs["data.tokenizer"] = (found.data.tokenizer, expected.data.tokenizer)
    for key, (saved, wanted) in pairs.items():
        if saved != wanted:
            raise ValueError(
                f"{source} is a checkpoint of another config: it has {key}={saved}, the given config has {wanted}; "
                f"leave --config out, or give the config it was trained with"
            )
