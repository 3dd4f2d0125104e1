"""The selected branch against the specification: both forms of it, forward and all gradients, on odd shapes.

Small sizes: without a GPU every program of a kernel costs milliseconds.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE, DTYPES, LIMIT, poisoned_memory, relative_rmse  # noqa: F401

# The import above turns on the interpreter where there is no GPU, so the kernels come after it.
from tamis.attention import reference  # isort: skip
from tamis.attention.kernels.banded import statistics as banded_statistics  # isort: skip
from tamis.attention.kernels.selected import layout as selected_layout  # isort: skip
from tamis.attention.kernels.selected import lists as selected_lists  # isort: skip
from tamis.attention.kernels.selected import pairs as selected_pairs  # isort: skip
from tamis.attention.kernels.selected import union as selected_union  # isort: skip
from tamis.attention.kernels.banded.queries import Rows  # isort: skip
from tamis.attention.kernels.banded.query_gradients import write_query_gradient  # isort: skip
from tamis.attention.kernels.launch import takes_halves  # isort: skip
from tamis.attention.kernels.selected.backward import selected_backward  # isort: skip
from tamis.attention.kernels.selected.layout import Layout  # isort: skip
from tamis.attention.kernels.selected.lists import chunks_of_pairs  # isort: skip
from tamis.attention.op import compressed_band, window_band  # isort: skip
from tamis.attention.spec import NSASpec  # isort: skip

SMALL = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
# One key takes nearly all weight, and dP − delta nearly cancels: delta from an output rounded to bfloat16, all else
# exact, is 6.6e-3 off in dq and 6.3e-3 in dk.
SLACK_OF_LARGE_LOGITS = 2.0


def union_of_every_tile(*inputs):  # type: ignore[no-untyped-def]
    out, lse, _ = selected_union.union_forward(*inputs)
    return out, lse


def union_of_short_tiles(*inputs):  # type: ignore[no-untyped-def]
    with patch.object(selected_union, "WORTHWHILE", 1.0):  # small inputs have few tiles with longer ones
        unions = selected_union.union_forward(*inputs, every_tile=False)
    return selected_pairs.pairs_forward(*inputs, rest_of=unions)


FORMS = {"pairs": selected_pairs.pairs_forward, "union": union_of_every_tile, "mixed": union_of_short_tiles}


def random_ids(spec: NSASpec, batch: int, tokens: int, groups: int, generator: torch.Generator) -> Tensor:
    """Choices as selection makes them: block 0, the two newest, and random others; ascending, −1 at the end."""
    block = torch.arange(spec.selection_blocks(tokens))
    newest = torch.arange(tokens)[None, :, None, None] // spec.l_sel
    rank = torch.rand(batch, tokens, groups, len(block), generator=generator)
    rank = rank.masked_fill((block == 0) | (block >= newest - 1), 2.0).masked_fill(block > newest, -1.0)
    best, ids = rank.sort(dim=-1, descending=True)
    ids = ids.masked_fill(best < 0, len(block))[..., : spec.n_sel].sort(dim=-1).values
    ids = torch.nn.functional.pad(ids, (0, spec.n_sel - ids.shape[-1]), value=len(block))
    return ids.masked_fill(ids == len(block), -1).to(torch.int32)


class Case:
    """Fresh inputs of one call, and what the specification makes of them."""

    def __init__(self, spec=SMALL, batch=1, tokens=50, groups=1, heads=2, dim=16, dtype=torch.float32, scale=1.0):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(tokens * 7 + heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, tokens, *shape, generator=generator).to(DEVICE, dtype)

        self.spec = spec
        self.q, self.k, self.v = normal(groups * heads, dim) * scale, normal(groups, dim), normal(groups, dim)
        self.gates, self.dout = normal(groups * heads, 3), normal(groups * heads, dim)
        self.ids = random_ids(spec, batch, tokens, groups, generator).to(DEVICE)

    def expected(self) -> list[Tensor]:
        q, k, v = (x.float().requires_grad_() for x in (self.q, self.k, self.v))
        out = reference.selected_attention(q, k, v, self.ids, self.spec)
        (out * self.gates[..., 1:2].float()).backward(self.dout.float())
        return [out, q.grad, k.grad, v.grad]  # type: ignore[list-item]

    def measured(self, forward, backward=selected_backward, **options) -> list[Tensor]:  # type: ignore[no-untyped-def]
        out, lse = forward(self.q, self.k, self.v, self.ids, self.spec, **options)
        dq = torch.full(self.q.shape, float("nan"), device=DEVICE)  # whatever is not written stays visible
        dk, dv = backward(
            self.q,
            self.k,
            self.v,
            self.ids,
            lse,
            self.dout,
            self.gates[..., 1],
            self.delta(out),
            dq,
            self.spec,
            **options,
        )
        return [out, dq, dk, dv]

    def delta(self, out: Tensor) -> Tensor:
        dot = (out.float() * self.dout.float()).sum(-1) * self.gates[..., 1].float()
        return dot.transpose(1, 2).contiguous()


def assert_agrees(
    measured: list[Tensor], expected: list[Tensor], dtype: torch.dtype = torch.float32, slack: float = 1.0
) -> None:
    """The gradients to `slack` times the limit."""
    for name, mine, truth in zip(("out", "dq", "dk", "dv"), measured, expected, strict=True):
        limit = LIMIT[dtype] * (1.0 if name == "out" else slack)
        error = relative_rmse(mine, truth)
        assert error < limit, f"{name}: {error:.2e}, at most {limit:.0e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 50, "groups": 2, "heads": 1},
        {"tokens": 45, "heads": 6, "batch": 2},
        {"tokens": 40, "heads": 16, "dim": 24},
        {"tokens": 70, "spec": NSASpec(8, 4, 24, 3, 24)},  # a block is no power of two
        {"tokens": 40, "spec": NSASpec(8, 4, 8, 5, 24)},  # shorter than the smallest key tile
        {"tokens": 170, "heads": 1, "spec": NSASpec(8, 4, 80, 3, 24)},  # longer than the largest
        {"tokens": 140, "heads": 1, "spec": NSASpec(2, 1, 2, 4, 24)},  # more blocks than a word of choices holds
        {"tokens": 7},  # a single, partial block
    ],
    ids=lambda shape: "-".join(f"{k}{v.l_sel if k == 'spec' else v}" for k, v in shape.items()),
)
def test_both_forms_agree_with_the_reference(form, shape, dtype) -> None:  # type: ignore[no-untyped-def]
    case = Case(**shape, dtype=dtype)
    assert_agrees(case.measured(FORMS[form]), case.expected(), dtype)


def test_sequences_cut_into_segments_and_chunks_give_the_same_gradients() -> None:
    case = Case(tokens=75, heads=3, batch=2)
    assert Layout.of(case.ids, case.spec, 1, chunk=32).segments_per_sequence == 3
    assert_agrees(case.measured(FORMS["pairs"], chunk=32), case.expected())


@pytest.mark.parametrize("cut", [{}, {"chunk": 32}, {"halves": True, "segment": 32, "chunk": 64}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [{"heads": 3, "groups": 2}, {"heads": 16}, {"heads": 1, "spec": NSASpec(8, 4, 80, 3, 24)}],
    ids=["groups", "many heads", "long blocks"],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_chunk_of_tokens_gets_the_query_gradient_of_all_branches(
    shape: dict, cut: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the sum of what the selected branch gives alone, and both dense branches together."""
    monkeypatch.setattr(selected_layout, "SHORTEST", 0)
    case = Case(tokens=75, batch=2, **shape)
    compressed = [x[:, : case.spec.compressed_blocks(75)].contiguous() for x in (case.k, case.v)]
    rows = Rows(*torch.rand(3, 2, case.q.shape[2], 75, device=DEVICE).unbind())
    dense = [(window_band(case.k, case.v, case.spec), rows), (compressed_band(*compressed, case.spec), rows)]
    _, lse = FORMS["pairs"](case.q, case.k, case.v, case.ids, case.spec)
    statistics = lse, case.dout, case.gates[..., 1], rows.delta
    alone, together, of_dense = (torch.full_like(case.q, float("nan")) for _ in range(3))
    inputs = case.q, case.k, case.v, case.ids, *statistics
    write_query_gradient(case.q, case.dout, of_dense, dense[0][0].scale, dense)
    selected_backward(*inputs, alone, case.spec)
    selected_backward(*inputs, together, case.spec, dense=dense, **cut)
    assert relative_rmse(together, alone + of_dense) < LIMIT[torch.float32]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("heads", [1, 6, 16])
def test_segments_cut_for_the_cache_and_queries_read_early_give_the_same_outputs(
    heads: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_layout, "SHORTEST", 0)
    case = Case(tokens=90, heads=heads, batch=1 if heads == 16 else 2)
    assert Layout.of(case.ids, case.spec, 1, segment=1).segments_per_sequence == 3
    out, lse = selected_pairs.pairs_forward(case.q, case.k, case.v, case.ids, case.spec, cached_bytes=1, early=early)
    other, other_lse = selected_pairs.pairs_forward(case.q, case.k, case.v, case.ids, case.spec, early=not early)
    assert relative_rmse(out, case.expected()[0]) < LIMIT[torch.float32]
    # The two multiply tiles of different shapes, and a BLAS may add up each shape in its own order: no equal bits.
    assert relative_rmse(out, other) < LIMIT[torch.float32] and relative_rmse(lse, other_lse) < LIMIT[torch.float32]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a union are copied by the tensor memory accelerator; the interpreter copies any shape."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor memory accelerator")
    if DEVICE == "cpu":
        monkeypatch.setattr(selected_union, "copies_tiles", lambda heads, *tensors: True)


@pytest.mark.parametrize("form", ["union", "mixed"])
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 75, "heads": 16, "batch": 2, "groups": 2},
        {"tokens": 75, "heads": 1},
        {"tokens": 90, "heads": 4, "spec": NSASpec(8, 4, 24, 3, 24)},
        {"tokens": 170, "heads": 2, "spec": NSASpec(8, 4, 80, 3, 24)},
        {"tokens": 7, "heads": 8},
    ],
    ids=lambda shape: "-".join(f"{k}{v.l_sel if k == 'spec' else v}" for k, v in shape.items()),
)
def test_a_union_of_copied_keys_agrees_with_the_reference(copied, form, shape) -> None:  # type: ignore[no-untyped-def]
    dtype, dim = (torch.bfloat16, 128) if DEVICE == "cuda" else (torch.float32, 32)
    case = Case(**shape, dtype=dtype, dim=dim)
    out, _ = FORMS[form](case.q, case.k, case.v, case.ids, case.spec)
    assert relative_rmse(out, case.expected()[0]) < LIMIT[dtype]


def test_keys_of_a_longer_cache_are_not_copied(copied) -> None:  # type: ignore[no-untyped-def]
    """A copy would bring what was never written there, and no weight of 0 makes a NaN vanish."""
    dtype, dim = (torch.bfloat16, 128) if DEVICE == "cuda" else (torch.float32, 32)
    case = Case(tokens=20, heads=4, dtype=dtype, dim=dim)
    longer = [torch.cat([x, torch.full_like(x, float("nan"))], dim=1) for x in (case.k, case.v)]
    out, _, _ = selected_union.union_forward(case.q, *longer, case.ids, case.spec)
    assert relative_rmse(out, case.expected()[0]) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "cut", "segments"),  # of a chunk, of a sequence
    [
        ({"tokens": 45, "heads": 6, "batch": 2}, {}, (2, 1)),
        ({"tokens": 75, "heads": 3, "batch": 2}, {"chunk": 32}, (1, 3)),
        ({"tokens": 75, "heads": 3, "batch": 3}, {"segment": 32, "chunk": 150}, (6, 3)),  # the last chunk is not full
        ({"tokens": 75, "heads": 3, "batch": 2}, {"segment": 32, "chunk": 64}, (2, 3)),  # two sequences meet in a chunk
        ({"tokens": 40, "heads": 16, "groups": 2, "scale": 30.0}, {}, (1, 1)),
        ({"tokens": 170, "heads": 1, "spec": NSASpec(8, 4, 80, 3, 24)}, {}, (1, 1)),
        ({"tokens": 7}, {}, (1, 1)),
    ],
    ids=lambda value: (
        "-".join(f"{k}{v}" for k, v in value.items() if k in ("tokens", "chunk", "segment"))
        if isinstance(value, dict)
        else f"{value[0]} of {value[1]}"
    ),
)
def test_gradients_in_halves_agree_with_the_reference(  # type: ignore[no-untyped-def]
    shape, cut, segments, dtype, monkeypatch
) -> None:
    monkeypatch.setattr(selected_layout, "SHORTEST", 0)

    def in_halves(*inputs):  # type: ignore[no-untyped-def]
        return selected_backward(*inputs, halves=True, **cut)

    case = Case(**shape, dim=32, dtype=dtype)
    layout = Layout.of(case.ids, case.spec, 1, **cut)
    assert (layout.segments_per_chunk, layout.segments_per_sequence) == segments
    if case.spec is SMALL and dtype is torch.float32:
        case.ids[:, 3:5] = -1  # rows that see nothing
    slack = SLACK_OF_LARGE_LOGITS if "scale" in shape and dtype is not torch.float32 else 1.0
    assert_agrees(case.measured(FORMS["pairs"], in_halves), case.expected(), dtype, slack)


def test_halves_are_taken_where_they_were_measured() -> None:
    def queries(dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(1, 1, 16, dim, dtype=dtype)

    assert takes_halves(queries(128, torch.bfloat16), 16) and takes_halves(queries(128, torch.float16), 4)
    others = ((64, torch.bfloat16), (96, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32))
    assert not any(takes_halves(queries(*other), 16) for other in others)
    assert not takes_halves(queries(128, torch.bfloat16), 6)  # 60 of 64 rows: more registers than there are


@pytest.mark.parametrize("form", FORMS)
def test_large_logits_stay_finite_and_right(form: str) -> None:
    case = Case(tokens=40, scale=30.0)
    assert_agrees(case.measured(FORMS[form]), case.expected())


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing_give_zeros_and_no_gradient(form: str) -> None:
    case = Case(tokens=40)
    case.ids[:, 5:9] = -1
    case.ids[:, 20, :, 1:] = -1
    case.ids[:, 20, :, 0] = 2  # a block that begins after the token
    out, dq, dk, dv = case.measured(FORMS[form])
    empty = [5, 6, 7, 8, 20]
    assert not out[:, empty].any() and not dq[:, empty].any()
    _, lse = FORMS[form](case.q, case.k, case.v, case.ids, case.spec)
    assert torch.isneginf(lse[..., empty]).all() and torch.isfinite(lse[..., 21:]).all()
    assert_agrees([out, dq, dk, dv], case.expected())


@pytest.mark.parametrize("form", FORMS)
def test_log_sum_exp_is_natural(form: str) -> None:
    case = Case(tokens=30, heads=3, spec=NSASpec(8, 4, 16, 3, 24))  # all blocks are chosen: plain causal attention
    _, lse = FORMS[form](case.q, case.k, case.v, case.ids, case.spec)
    scores = torch.einsum("bshd,btd->bhst", case.q, case.k[:, :, 0]) * case.q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(30, 30, device=DEVICE).triu(1).bool(), -float("inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_strided_inputs_and_a_query_gradient_of_another_precision() -> None:
    case = Case(tokens=33, groups=2, heads=3)
    expected = case.expected()
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.k = torch.cat([case.k, case.k], dim=-1)[..., : case.k.shape[-1]]
    case.v = case.v.transpose(-1, -2).contiguous().transpose(-1, -2)
    out, lse = selected_pairs.selected_forward(case.q, case.k, case.v, case.ids, case.spec)
    dq = torch.ones_like(case.q, dtype=torch.float32)
    dk, dv = selected_backward(
        case.q,
        case.k,
        case.v,
        case.ids,
        lse,
        case.dout,
        case.gates[..., 1],
        case.delta(out),
        dq,
        case.spec,
    )
    assert_agrees([out, dq, dk, dv], expected)


def test_same_inputs_give_the_same_bits() -> None:
    case = Case(tokens=60, heads=6)
    for form in FORMS.values():
        assert all(torch.equal(a, b) for a, b in zip(case.measured(form), case.measured(form), strict=True))


def test_statistics_are_gathered_for_every_sequence_by_a_grid_of_one_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid's other dimensions take no more than 65,535 programs; a batch of short sequences may be larger."""
    grids = []
    kernel = banded_statistics._transpose_statistics
    recorder = type("Recorder", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})
    monkeypatch.setattr(banded_statistics, "_transpose_statistics", recorder())
    lse, delta = torch.randn(2, 3, 5, 70, device=DEVICE)  # batch 3, 5 heads; 70 tokens are two tiles
    gates = torch.randn(3, 70, 5, 3, device=DEVICE)[..., 1]
    statistics = banded_statistics.gather_statistics(lse, delta, gates)
    expected = torch.stack((lse.transpose(1, 2) * 1.4426950408889634, delta.transpose(1, 2), gates))
    torch.testing.assert_close(statistics, expected)
    assert grids == [(6,)]


@pytest.mark.parametrize("words", [1, 37, 16 * 7, 16 * 2300 + 5])
def test_marks_are_counted_over_any_number_of_tiles(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_lists, "FEW_WORDS", 0)
    monkeypatch.setattr(selected_lists, "WORDS_OF_TILE", 16)
    marks = torch.randint(-(2**31), 2**31, (words,), generator=torch.Generator().manual_seed(words)).int()
    bits = sum(marks >> bit & 1 for bit in range(32))
    assert torch.equal(selected_lists._ends_of(marks.to(DEVICE)).cpu(), bits.cumsum(0).int())


@pytest.mark.parametrize("few_words", [0, selected_lists.FEW_WORDS])
def test_every_pair_is_listed_once_in_order_and_items_are_bounded(
    few_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_lists, "FEW_WORDS", few_words)
    case = Case(tokens=300, groups=2, heads=1, batch=2)
    layout = Layout.of(case.ids, case.spec, 1, chunk=600, item=128)
    (chunk,) = chunks_of_pairs(case.ids, layout)
    found = []
    for list_id, start, count in zip(
        chunk.item_list.tolist(), chunk.item_start.tolist(), chunk.item_count.tolist(), strict=True
    ):
        assert 0 <= count <= layout.item
        pairs = chunk.pairs[start : start + count].tolist()
        assert pairs == sorted(pairs)
        sequence, group = divmod(list_id // layout.blocks, layout.groups)
        found += [
            (sequence, pair // layout.slots, group, pair % layout.slots, list_id % layout.blocks) for pair in pairs
        ]
    expected = [(*where, int(case.ids[tuple(where)])) for where in (case.ids >= 0).nonzero().tolist()]
    assert sorted(found) == sorted(expected)
