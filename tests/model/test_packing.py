"""Packed rows: every document of a row gives what it gives alone, in value and in every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tamis.model import dense
from tests.model.tiny import random_tokens, tiny_model

KINDS = ["nsa.layers=nsa", "nsa.phi=avg", "nsa.layers=window", "model.attention=dense", "nsa.layers=[window, nsa]"]
lengths_of_documents = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=6)


def offsets(lengths: list[int], padding: int = 0) -> Tensor:
    ends = torch.tensor([0, *lengths, *[0] * padding]).cumsum(0)
    return ends.int()


def hidden_and_gradients(model: torch.nn.Module, call) -> tuple[Tensor, list[Tensor]]:  # type: ignore[no-untyped-def]
    hidden = call()
    gradients = torch.autograd.grad(hidden.sin().sum(), list(model.parameters()), materialize_grads=True)
    return hidden, list(gradients)


@settings(max_examples=12, deadline=None)
@given(lengths=lengths_of_documents, padding=st.integers(0, 2), kind=st.sampled_from(KINDS))
def test_a_packed_row_equals_its_documents_one_by_one(lengths: list[int], padding: int, kind: str) -> None:
    model = tiny_model(kind, "train.seq_len=240")
    tokens = random_tokens(1, sum(lengths), seed=len(lengths))
    packed = hidden_and_gradients(model, lambda: model(tokens, offsets(lengths, padding))[0])
    alone = hidden_and_gradients(
        model, lambda: torch.cat([model(document)[0] for document in tokens.split(lengths, dim=1)], dim=1)
    )
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(packed[1], alone[1], rtol=1e-2, atol=1e-2)


def test_flash_attention_is_asked_to_be_causal_in_the_words_of_old_and_new_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.attention import varlen

    asked = []

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):  # type: ignore[no-untyped-def]
        asked.append((key.shape, max_q, is_causal))
        return query

    def new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        asked.append((key.shape, max_q, window_size))
        return query

    q, k, v = (torch.zeros(1, 30, heads, 8) for heads in (4, 2, 2))
    for function, takes_windows in ((old, False), (new, True)):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        monkeypatch.setattr(dense, "VARLEN_TAKES_WINDOWS", takes_windows)
        assert dense.flash_packed_attention(q, k, v, offsets([10, 20]), 20).shape == q.shape
    dense.flash_packed_attention(q, k, v, offsets([10, 20]), 64)
    assert asked == [((30, 4, 8), 20, True), ((30, 4, 8), 20, (-1, 0)), ((30, 4, 8), 30, (-1, 0))]


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_that_fills_the_row_is_the_row(kind: str) -> None:
    model, tokens = tiny_model(kind), random_tokens(1, 72)
    torch.testing.assert_close(model(tokens, offsets([72]))[0], model(tokens)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_of_several_rows_are_packed_together(kind: str) -> None:
    model, tokens = tiny_model(kind), random_tokens(2, 31)
    rows = [[13, 17], [30]]
    loss = model.loss(tokens, offsets([*rows[0], *rows[1]]))[0]
    alone = [model.loss(tokens[i : i + 1], offsets(row))[0] for i, row in enumerate(rows)]
    torch.testing.assert_close(loss, torch.stack(alone).mean(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(loss, model.loss(tokens)[0], rtol=1e-4, atol=1e-4)  # the boundary inside a row matters


def test_checkpointed_blocks_are_packed_too() -> None:
    tokens, packing = random_tokens(1, 61), offsets([20, 40])
    plain, recomputed = (tiny_model(f"runtime.gradient_checkpointing={on}").train() for on in ("false", "true"))
    losses = [model.loss(tokens, packing)[0] for model in (plain, recomputed)]
    assert torch.equal(*losses)
