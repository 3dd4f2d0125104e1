"""Inputs for the proofs of the reference, in float64 and named, and the properties' space of specs and sizes."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tamis.attention import NSASpec

SMALL = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=16)
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True)
class Sizes:
    tokens: int
    batch: int = 1
    groups: int = 2
    heads_per_group: int = 3
    dim: int = 4


def make_inputs(spec: NSASpec, sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The tensor arguments of `nsa_attention` by name."""
    generator = torch.Generator().manual_seed(seed)
    heads = sizes.groups * sizes.heads_per_group
    blocks = spec.compressed_blocks(sizes.tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(sizes.batch, *shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = {"q": normal(sizes.tokens, heads, sizes.dim)}
    for name in NAMES[1:7]:
        inputs[name] = normal(blocks if name.endswith("cmp") else sizes.tokens, sizes.groups, sizes.dim)
    return inputs | {"gates": torch.sigmoid(normal(sizes.tokens, heads, 3))}


@st.composite
def specs(draw: st.DrawFn) -> NSASpec:
    d = draw(st.integers(1, 4))
    return NSASpec(
        l=d * draw(st.integers(1, 4)),
        d=d,
        l_sel=d * draw(st.integers(1, 4)),
        n_sel=draw(st.integers(3, 7)),
        w=draw(st.integers(1, 20)),
    )


def all_sizes(most_tokens: int = 40) -> st.SearchStrategy[Sizes]:
    return st.builds(
        Sizes,
        tokens=st.integers(1, most_tokens),
        batch=st.integers(1, 2),
        groups=st.sampled_from([1, 2, 6]),
        heads_per_group=st.sampled_from([1, 2, 6]),
        dim=st.sampled_from([1, 3, 4]),
    )
