"""Addresses beyond 2^31 elements: every input lies so far apart that 32-bit offsets would wrap."""

import mmap

import pytest
import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.attention.agreement import random_inputs
from tamis.attention.op import gradients, run_forward
from tamis.attention.spec import as_numbers

SPEC = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
TOKENS, DIM = 76, 16
STRIDE = 2**25  # elements between tokens: the last ones lie beyond 2^31
ELEMENTS = TOKENS * STRIDE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs memory that is never touched")


@pytest.fixture(scope="module")
def memory() -> Tensor:
    """Room for all of it in address space alone: only the pages that are written exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 4 * ELEMENTS, flags=flags), dtype=torch.float32)


def far(x: Tensor, memory: Tensor, place: int) -> Tensor:
    """The same numbers `[1,N,H,D]`; tokens lie far apart. Compressed blocks are too few for that."""
    if x.shape[1] < TOKENS:
        return x
    spread = memory.as_strided(x.shape, (0, STRIDE, DIM, 1), place * DIM)
    assert (TOKENS - 1) * STRIDE >= 2**31
    return spread.copy_(x)


def forward_and_backward(inputs: list[Tensor], gates: Tensor, dout: Tensor) -> list[Tensor]:
    arguments: list = [*inputs, gates]
    out, *saved = run_forward(*arguments, as_numbers(SPEC))
    return [out, *gradients(dout, [*arguments, *saved], as_numbers(SPEC))]


def test_offsets_beyond_31_bits_change_no_bit(memory: Tensor) -> None:
    *inputs, gates = random_inputs("cpu", torch.float32, 1, 1, DIM, SPEC, TOKENS)
    dout = torch.randn(inputs[0].shape)
    near = forward_and_backward(inputs, gates, dout)
    spread = [far(x, memory, place) for place, x in enumerate([*inputs, dout])]
    assert all(
        torch.equal(a, b) for a, b in zip(forward_and_backward(spread[:-1], gates, spread[-1]), near, strict=True)
    )
