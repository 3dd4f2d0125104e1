"""Packed documents: a row of several documents gives what each of them gives alone, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.devices import DEVICE, poisoned_memory, random_inputs, relative_rmse  # isort: skip
from tamis.attention import NSAAttention, NSASpec, nsa, nsa_attention, op, select_blocks
from tamis.attention.kernels import selection, tape
from tamis.attention.kernels.banded import keys, queries
from tamis.attention.kernels.selected import backward, layout, union
from tamis.attention.kernels.tables import write_tables
from tamis.attention.packing import (
    PackedRow,
    compressed_layout,
    documents,
    positions_in_documents,
    reference_tables,
)
from tamis.attention.spec import as_numbers

__all__ = ["poisoned_memory"]

SPEC = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=12)


def offsets(lengths: list[int], padding: int = 0) -> Tensor:
    """`cu_seqlens` of documents of these lengths, then empty documents."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return torch.tensor([0, *ends, *[ends[-1]] * padding], dtype=torch.int32, device=DEVICE)


def packed_inputs(lengths: list[int], spec: NSASpec, **shape: int) -> list[Tensor]:
    """Inputs of a row; the compressed slots that no document uses hold large numbers."""
    inputs = [x.detach() for x in random_inputs(spec, tokens=sum(lengths), **shape)]
    used = sum(spec.compressed_blocks(n) for n in lengths)
    for x in inputs[1:3]:
        x[:, used:] = 1e4
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
    packed = with_gradients(
        lambda x: nsa_attention(*x, spec, backend, cu_seqlens=cu_seqlens, max_seqlen=max(lengths)),  # type: ignore[arg-type]
        inputs,
    )
    alone = with_gradients(lambda x: one_by_one(x, lengths, spec, "reference")[0], inputs)
    errors = [relative_rmse(x, y, floor=0.1) for x, y in zip(packed, alone, strict=True)]
    assert max(errors) <= 1e-5, errors


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 3))
def test_the_reference_of_a_packed_row_equals_its_documents_alone(lengths: list[int], padding: int) -> None:
    assert_equals_its_documents(lengths, SPEC, "reference", padding)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 3))
def test_the_kernels_of_a_packed_row_equal_its_documents_alone(lengths: list[int], padding: int) -> None:
    assert_equals_its_documents(lengths, SPEC, "triton", padding, groups=1, heads_per_group=2)


def test_empty_documents_change_no_bit() -> None:
    inputs, lengths = packed_inputs([9, 30, 2, 19], SPEC, groups=1, heads_per_group=2), [9, 30, 2, 19]

    def results(padding: int) -> list[Tensor]:
        packed = {"cu_seqlens": offsets(lengths, padding), "max_seqlen": 40}
        return with_gradients(lambda x: nsa_attention(*x, SPEC, "triton", **packed), inputs)

    for few, many in zip(results(0), results(70), strict=True):
        assert torch.equal(few, many)


# With blocks of 4 tokens, 150 tokens are more than four times as many blocks as a query chooses: both forms take part.
FINE = NSASpec(l=4, d=2, l_sel=4, n_sel=3, w=7)
DENSE = NSASpec(l=2, d=1, l_sel=4, n_sel=3, w=7)  # 80 tokens have more compressed blocks than a tile holds


@pytest.mark.parametrize(
    ("lengths", "spec", "shape"),
    [
        ([1] * 20, SPEC, {}),
        ([61], SPEC, {"heads_per_group": 6}),
        ([7, 100, 43], FINE, {"heads_per_group": 1, "dim": 32}),
        ([40, 3, 50], NSASpec(l=8, d=4, l_sel=24, n_sel=3, w=50), {"heads_per_group": 3, "groups": 2}),
        ([30, 70], NSASpec(l=12, d=4, l_sel=4, n_sel=4, w=5), {}),
        ([3, 80, 1, 20], DENSE, {"heads_per_group": 1}),
    ],
    ids=[
        "one token each",
        "one document",
        "both forms",
        "blocks of no power of two",
        "wide compressed blocks",
        "tiles",
    ],
)
def test_documents_of_every_kind_give_what_they_give_alone(poisoned_memory, lengths, spec, shape) -> None:  # type: ignore[no-untyped-def]
    assert_equals_its_documents(lengths, spec, "triton", **({"groups": 1, "heads_per_group": 2} | shape))


@pytest.mark.parametrize("lengths", [[7, 100, 43], [*[3] * 25, 40, *[1] * 9]], ids=["cut by chunks", "tiny"])
def test_documents_that_chunks_cut_give_what_they_give_alone(poisoned_memory, monkeypatch, lengths) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(layout, "LARGE", 32)
    assert_equals_its_documents(lengths, FINE, "triton", groups=1, heads_per_group=1)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU copies at head dim 128 alone: see tests/gpu/matrix.py")
def test_copied_tiles_and_gradients_in_halves_stay_inside_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (queries, keys, selection, union):
        monkeypatch.setattr(module, "copies_tiles", lambda heads, *tensors: all(x.numel() > 0 for x in tensors))
    monkeypatch.setattr(backward, "takes_halves", lambda *args: True)
    assert_equals_its_documents([9, 70, 1, 30], FINE, "triton", groups=1, heads_per_group=4, dim=32)


def test_the_kernels_choose_blocks_of_the_document_as_the_reference_does() -> None:
    lengths = [5, 90, 1, 64]
    q, k_cmp, *_ = packed_inputs(lengths, SPEC)
    row = PackedRow.of(offsets(lengths, 2), sum(lengths), SPEC)
    ids = [select_blocks(q, k_cmp, SPEC, backend, cu_seqlens=row) for backend in ("triton", "reference")]  # type: ignore[arg-type]
    assert torch.equal(ids[0] < 0, ids[1] < 0)
    assert (ids[0] != ids[1]).float().mean() < 0.01  # only where two blocks score the same to float32 rounding


@pytest.mark.parametrize("lengths", [[41], [20, 21]])
def test_scores_take_another_scale(lengths: list[int]) -> None:
    cu_seqlens = offsets(lengths) if len(lengths) > 1 else None
    inputs = packed_inputs(lengths, SPEC, groups=1, heads_per_group=2)
    measured, expected, other = (
        with_gradients(lambda x, b=b, s=s: nsa_attention(*x, SPEC, b, cu_seqlens=cu_seqlens, scale=s), inputs)
        for b, s in (("triton", 0.7), ("reference", 0.7), ("reference", None))
    )
    assert max(relative_rmse(x, y) for x, y in zip(measured, expected, strict=True)) <= 1e-5
    assert relative_rmse(other[0], expected[0]) > 0.01


@pytest.mark.parametrize("lengths", [[61], [9, 52]])
def test_given_blocks_replace_the_choice_and_log_sum_exps_come_along(lengths: list[int]) -> None:
    cu_seqlens = offsets(lengths) if len(lengths) > 1 else None
    inputs = packed_inputs(lengths, SPEC, groups=1, heads_per_group=2)
    ids = select_blocks(inputs[0], inputs[1], SPEC, "reference", cu_seqlens=cu_seqlens)
    ids[:, -5:, :, 1:3] = ids[:, -5:, :, 2:]  # the last queries drop a block
    ids[:, -5:, :, 3] = -1
    options = {"cu_seqlens": cu_seqlens, "block_ids": ids, "return_lse": True}
    (out, lse), (expected, expected_lse) = (
        nsa_attention(*inputs, SPEC, backend, **options) for backend in ("triton", "reference")
    )
    chosen = nsa_attention(*inputs, SPEC, "reference", cu_seqlens=cu_seqlens)
    assert relative_rmse(out, expected) <= 1e-5
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert lse.shape == (3, 1, 2, 61) and lse.dtype == torch.float32
    assert torch.isneginf(lse[0, ..., : SPEC.l - 1]).all() and torch.isfinite(lse[1:]).all()
    torch.testing.assert_close(expected[:, :-5], chosen[:, :-5])
    assert relative_rmse(expected[:, -5:], chosen[:, -5:]) > 0.01
    with pytest.raises(ValueError, match="block_ids must be ascending, each block once"):
        nsa_attention(*inputs, SPEC, block_ids=ids.flip(-1), cu_seqlens=cu_seqlens)
    later = ids.clone()
    later[:, lengths[0] - 1, :, 0], later[:, lengths[0] - 1, :, 1:] = -(-lengths[0] // SPEC.l_sel), -1
    if cu_seqlens is not None:  # the row has such a block, and it belongs to the next document
        with pytest.raises(ValueError, match="block_ids must name no block after the query's own"):
            nsa_attention(*inputs, SPEC, block_ids=later, cu_seqlens=cu_seqlens)


@pytest.mark.skipif(DEVICE == "cuda", reason="replaces the interpreter's launches")
def test_launches_depend_on_shapes_alone_and_the_host_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled kernel and one CUDA graph serve every batch."""
    from triton.runtime.interpreter import InterpretedFunction

    from tests.attention.test_inputs import NothingIsRead

    launches: list[object] = []

    def recorded(self, grid):  # type: ignore[no-untyped-def]
        def launch(*args, **kwargs):  # type: ignore[no-untyped-def]
            numbers = [x for x in args if not hasattr(x, "data_ptr") and not hasattr(x, "base")]
            launches.append((self.fn.__name__, grid, numbers, kwargs))

        return launch

    monkeypatch.setattr(InterpretedFunction, "__getitem__", recorded)
    inputs = packed_inputs([90], FINE, groups=1)
    seen = []
    for lengths in ([90], [1, 50, 39], [30, 30, 30]):
        launches.clear()
        tape.forget()
        cu_seqlens = offsets(lengths, 3 - len(lengths))
        with NothingIsRead():
            out, *saved = op.nsa_forward._init_fn(
                *inputs, as_numbers(FINE), PackedRow.of(cu_seqlens, 90, FINE).flat, 3, 90
            )
            flat = PackedRow.of(cu_seqlens, 90, FINE).flat
            op.gradients(out, [*inputs, *saved], as_numbers(FINE), flat, 3, 90)
        seen.append(list(launches))
    assert len(seen[0]) > 15 and seen[0] == seen[1] == seen[2]


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


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is not waited for")
def test_offsets_on_the_cpu_that_do_not_end_with_the_row_are_refused_by_every_function() -> None:
    inputs = [x.detach() for x in random_inputs(SPEC, tokens=20)]
    q, k_cmp, _, k, v, *_, gates = inputs
    layer = NSAAttention(16, 4, 2, 4, SPEC, max_len=64)
    calls = (
        lambda offsets: nsa(q, k, v, gates, SPEC, cu_seqlens=offsets),
        lambda offsets: nsa_attention(*inputs, SPEC, cu_seqlens=offsets),
        lambda offsets: select_blocks(q, k_cmp, SPEC, cu_seqlens=offsets),
        lambda offsets: layer(torch.randn(1, 20, 16), offsets),
        lambda offsets: PackedRow.of(offsets, 20, SPEC),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"end with 20 tokens, got \[0, 10, 19\]"):
            call(torch.tensor([0, 10, 19], dtype=torch.int32))
    for call in calls[:-1]:
        with pytest.raises(ValueError, match="cu_seqlens must be an int32 tensor or a PackedRow, got a list"):
            call([0, 10, 20])


def test_a_batch_of_packed_rows_is_refused() -> None:
    inputs = [x.detach() for x in random_inputs(SPEC, tokens=20, batch=2)]
    with pytest.raises(ValueError, match=r"with cu_seqlens q must be one packed row \[1, tokens, heads, dim\]"):
        nsa_attention(*inputs, SPEC, cu_seqlens=offsets([20]))


def test_tables_of_another_row_are_refused() -> None:
    inputs = [x.detach() for x in random_inputs(SPEC, tokens=20)]
    with pytest.raises(ValueError, match="cu_seqlens was made for a row of 21 tokens, q has 20"):
        nsa_attention(*inputs, SPEC, cu_seqlens=PackedRow.of(offsets([21]), 21, SPEC))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(0, 3), st.sampled_from([1, 100]), st.booleans()
)
def test_the_kernels_write_the_tables_of_the_reference(
    lengths: list[int], padding: int, longest: int, dense: bool
) -> None:
    lengths, spec = [*lengths, longest], DENSE if dense else SPEC
    cu_seqlens, tokens = offsets(lengths, padding), sum(lengths)
    expected = [x.to(torch.int32).flatten() for x in reference_tables(cu_seqlens, tokens, spec)]
    written = [torch.full_like(x, -7) for x in expected]
    write_tables(cu_seqlens, tokens, spec, *written)
    for measured, wanted in zip(written, expected, strict=True):
        torch.testing.assert_close(measured, wanted)
    row, layout = PackedRow.of(cu_seqlens, tokens, spec), compressed_layout(cu_seqlens, tokens, spec)
    torch.testing.assert_close(row.positions(), positions_in_documents(cu_seqlens, tokens))
    for name in ("exists", "first_token", "last_position"):
        assert torch.equal(getattr(row.layout(spec), name), getattr(layout, name))
