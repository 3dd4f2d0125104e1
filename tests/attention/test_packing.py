"""Packed documents: a row of several documents gives what each of them gives alone, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.devices import DEVICE, random_inputs, relative_rmse  # isort: skip
from tamis.attention import NSASpec, nsa_attention, select_blocks
from tamis.attention.packing import compressed_layout, documents, positions_in_documents

SPEC = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=12)


def offsets(lengths: list[int], padding: int = 0) -> Tensor:
    """`cu_seqlens` of documents of these lengths, then empty documents."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return torch.tensor([0, *ends, *[ends[-1]] * padding], dtype=torch.int32, device=DEVICE)


def packed_inputs(lengths: list[int], spec: NSASpec, **shape: int) -> list[Tensor]:
    """Inputs of a row; the compressed slots that no document uses are poison."""
    inputs = [x.detach() for x in random_inputs(spec, tokens=sum(lengths), **shape)]
    used = sum(spec.compressed_blocks(n) for n in lengths)
    for x in inputs[1:3]:
        x[:, used:] = float("nan")
    return inputs


def one_by_one(inputs: list[Tensor], lengths: list[int], spec: NSASpec, backend: str) -> list[Tensor]:
    q, k_cmp, v_cmp, *others = inputs
    outs, token, block = [], 0, 0
    for n in lengths:
        blocks = slice(block, block + spec.compressed_blocks(n))
        row = slice(token, token + n)
        rest = (x[:, row] for x in others)
        outs.append(nsa_attention(q[:, row], k_cmp[:, blocks], v_cmp[:, blocks], *rest, spec, backend))  # type: ignore[arg-type]
        token, block = row.stop, blocks.stop
    return [torch.cat(outs, dim=1)]


def with_gradients(attend, inputs: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_equals_its_documents(
    lengths: list[int], spec: NSASpec, backend: str, padding: int = 1, **shape: int
) -> None:
    inputs = packed_inputs(lengths, spec, **shape)
    cu_seqlens = offsets(lengths, padding)
    packed = with_gradients(lambda x: nsa_attention(*x, spec, backend, cu_seqlens=cu_seqlens), inputs)  # type: ignore[arg-type]
    alone = with_gradients(lambda x: one_by_one(x, lengths, spec, "reference")[0], inputs)
    errors = [relative_rmse(x, y) for x, y in zip(packed, alone, strict=True)]
    assert max(errors) <= 1e-5, errors


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 3))
def test_the_reference_of_a_packed_row_equals_its_documents_alone(lengths: list[int], padding: int) -> None:
    assert_equals_its_documents(lengths, SPEC, "reference", padding)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(0, 3))
def test_the_layout_lists_every_document_s_blocks_and_then_unused_slots(lengths: list[int], padding: int) -> None:
    cu_seqlens, tokens = offsets(lengths, padding), sum(lengths)
    layout = compressed_layout(cu_seqlens, tokens, SPEC)
    assert len(layout.exists) == SPEC.compressed_blocks(tokens)
    expected = [
        (row.start + i * SPEC.d, SPEC.last_token(i))
        for row, blocks in documents(cu_seqlens, tokens, SPEC)
        for i in range(blocks.stop - blocks.start)
    ]
    used = layout.exists.tolist()
    assert used == [True] * len(expected) + [False] * (len(used) - len(expected))
    found = list(zip(layout.first_token.tolist(), layout.last_position.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert positions_in_documents(cu_seqlens, tokens).tolist() == [i for n in lengths for i in range(n)]


def test_block_ids_of_a_packed_row_count_from_the_document() -> None:
    lengths = [5, 60, 1, 44]
    q, k_cmp, *_ = packed_inputs(lengths, SPEC)
    ids = select_blocks(q, k_cmp, SPEC, "reference", cu_seqlens=offsets(lengths))
    assert ids[0, 5].tolist() == ids[0, 65].tolist() == [[0, -1, -1, -1]] * 2  # first tokens of documents
    assert ids.max() == (60 - 1) // SPEC.l_sel


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 20]), "cu_seqlens must be int32, got torch.int64"),
        (torch.tensor([[0, 20]], dtype=torch.int32), r"cu_seqlens must have shape \[documents \+ 1\], got \[1, 2\]"),
        (
            torch.tensor([0, 12, 7, 20], dtype=torch.int32),
            "must begin with 0, never decrease and end with 20",
        ),
        (torch.tensor([0, 19], dtype=torch.int32), "end with 20 tokens"),
    ],
)
def test_offsets_that_do_not_fit_the_row_are_refused(cu_seqlens: Tensor, message: str) -> None:
    inputs = [x.detach() for x in random_inputs(SPEC, tokens=20)]
    with pytest.raises(ValueError, match=message):
        nsa_attention(*inputs, SPEC, "reference", cu_seqlens=cu_seqlens.to(DEVICE))


def test_a_batch_of_packed_rows_is_refused() -> None:
    inputs = [x.detach() for x in random_inputs(SPEC, tokens=20, batch=2)]
    with pytest.raises(ValueError, match=r"with cu_seqlens q must be one packed row \[1, tokens, heads, dim\]"):
        nsa_attention(*inputs, SPEC, cu_seqlens=offsets([20]))
