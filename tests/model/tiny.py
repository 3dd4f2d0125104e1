"""A model small enough to prove things about: every part of M7C, in a few thousand parameters."""

import torch
from torch import Tensor

from tamis.config import Config, load_config
from tamis.model import Decoder

TINY = [
    "model.dim=32",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_groups=2",
    "model.d_k=8",
    "model.d_ff=48",
    "nsa.l=8",
    "nsa.d=4",
    "nsa.l_sel=8",
    "nsa.n_sel=4",
    "nsa.w=16",
    "data.tokenizer=byte",
    "train.seq_len=72",
]


def tiny_config(*overrides: str) -> Config:
    return load_config(None, [*TINY, *overrides])


def tiny_model(*overrides: str, seed: int = 0) -> Decoder:
    """Gates and matrices are drawn wide, so that every branch matters and an error in one shows."""
    torch.manual_seed(seed)
    model = Decoder(tiny_config(*overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=0.3)
    return model


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(seed))
