"""Causality by perturbation: whatever happens after a query, its output and its gradients keep every bit."""

import pytest
import torch
from torch import Tensor

from tamis.attention import nsa_attention, select_blocks
from tests.attention.inputs import SMALL, Sizes, make_inputs

LENGTHS = sorted({edge + step for edge in (SMALL.l, SMALL.w, 2 * SMALL.w, 4 * SMALL.w) for step in (-1, 0, 1)})


def cuts(tokens: int) -> list[int]:
    """Last positions of the past: the ends of the sequence, and around the edges of blocks and window."""
    edges = {0, SMALL.l - 2, SMALL.l - 1, SMALL.l, SMALL.w - 1, SMALL.w, tokens // 2, tokens - 2}
    return sorted(t for t in edges if 0 <= t < tokens - 1)


def past_of(name: str, last: int) -> slice:
    """The part of an input that a query at `last` may depend on: tokens, or whole compressed blocks."""
    return slice(0, SMALL.compressed_blocks(last + 1) if name.endswith("_cmp") else last + 1)


def with_another_future(inputs: dict[str, Tensor], last: int) -> dict[str, Tensor]:
    changed = {name: torch.randn_like(x) * 50 for name, x in inputs.items()}
    for name, x in inputs.items():
        changed[name][:, past_of(name, last)] = x[:, past_of(name, last)]
    return changed


def past_gradients(inputs: dict[str, Tensor], last: int) -> dict[str, Tensor]:
    """Gradients of a sum over the past's outputs."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = nsa_attention(**leaves, spec=SMALL)[:, : last + 1]
    grads = torch.autograd.grad(out.sin().sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_another_future_leaves_the_pasts_output_and_selection_bit_identical(tokens: int) -> None:
    inputs = make_inputs(SMALL, Sizes(tokens), dtype=torch.float32)
    out, ids = nsa_attention(**inputs, spec=SMALL), select_blocks(inputs["q"], inputs["k_cmp"], SMALL)
    for last in cuts(tokens):
        changed = with_another_future(inputs, last)
        assert torch.equal(nsa_attention(**changed, spec=SMALL)[:, : last + 1], out[:, : last + 1])
        assert torch.equal(select_blocks(changed["q"], changed["k_cmp"], SMALL)[:, : last + 1], ids[:, : last + 1])


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_pasts_gradients_ignore_the_future_and_never_reach_it(tokens: int) -> None:
    inputs = make_inputs(SMALL, Sizes(tokens), dtype=torch.float32)
    for last in cuts(tokens):
        grads = past_gradients(inputs, last)
        changed = past_gradients(with_another_future(inputs, last), last)
        for name, grad in grads.items():
            past = past_of(name, last)
            assert torch.equal(changed[name][:, past], grad[:, past]), name
            assert not grad[:, past.stop :].any(), name


@pytest.mark.parametrize("name", ["k_sel", "v_sel", "k_win", "v_win"])
def test_a_query_does_see_its_own_token(name: str) -> None:
    inputs = make_inputs(SMALL, Sizes(40))
    grad = past_gradients(inputs, 39)[name]
    assert grad[:, 39].abs().min() > 0


@pytest.mark.parametrize("last", [SMALL.w, 39])
def test_the_window_ends_where_it_should(last: int) -> None:
    inputs = make_inputs(SMALL, Sizes(40))
    leaf = inputs["v_win"].clone().requires_grad_()
    nsa_attention(**(inputs | {"v_win": leaf}), spec=SMALL)[:, last].sum().backward()
    seen = leaf.grad.abs().amin(dim=(0, 2, 3)) > 0
    assert seen.nonzero().flatten().tolist() == list(range(last - SMALL.w + 1, last + 1))
