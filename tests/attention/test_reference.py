"""The specification held to its second statement (`paper.py`), to dense attention, and to finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tamis.attention import NSASpec, nsa_attention, reference
from tests.attention import paper
from tests.attention.inputs import NAMES, SMALL, Sizes, all_sizes, make_inputs, specs

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def branch_outputs(inputs: dict[str, Tensor], spec: NSASpec) -> Tensor:
    """The reference's branches [B,S,H,3,D], each through the public gates: one gate open at a time."""
    one_open = torch.eye(3, dtype=inputs["gates"].dtype)
    opened = [inputs | {"gates": torch.zeros_like(inputs["gates"]) + one_open[b]} for b in range(3)]
    return torch.stack([nsa_attention(**x, spec=spec, backend="reference") for x in opened], dim=-2)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@settings(max_examples=60)
@given(specs(), all_sizes(), st.integers(0, 99))
def test_output_equals_the_papers_statement(spec: NSASpec, sizes: Sizes, seed: int) -> None:
    inputs = make_inputs(spec, sizes, seed)
    torch.testing.assert_close(nsa_attention(**inputs, spec=spec), paper.attention(**inputs, spec=spec), **TIGHT)


@settings(max_examples=15)
@given(specs(), all_sizes(most_tokens=24), st.integers(0, 99))
def test_every_gradient_equals_the_papers_statement(spec: NSASpec, sizes: Sizes, seed: int) -> None:
    inputs = {name: x.requires_grad_() for name, x in make_inputs(spec, sizes, seed).items()}
    weight = torch.randn_like(inputs["q"])
    ours, papers = (
        torch.autograd.grad((f(**inputs, spec=spec) * weight).sum(), list(inputs.values()), materialize_grads=True)
        for f in (nsa_attention, paper.attention)
    )
    for name, our, expected in zip(NAMES, ours, papers, strict=True):
        torch.testing.assert_close(our, expected, **TIGHT, msg=lambda m, name=name: f"gradient of {name}: {m}")


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 50])
def test_each_branch_equals_the_papers_statement(tokens: int) -> None:
    inputs = make_inputs(SMALL, Sizes(tokens))
    without_gates = {name: x for name, x in inputs.items() if name != "gates"}
    torch.testing.assert_close(branch_outputs(inputs, SMALL), paper.branches(**without_gates, spec=SMALL), **TIGHT)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 5e-3)], ids=str
)
def test_lower_precisions_stay_within_the_agreed_error(dtype: torch.dtype, limit: float) -> None:
    inputs = make_inputs(SMALL, Sizes(70), dtype=dtype)
    out = nsa_attention(**inputs, spec=SMALL)
    expected = paper.attention(**{name: x.double() for name, x in inputs.items()}, spec=SMALL)
    assert out.dtype == dtype
    assert ((out.double() - expected).norm() / expected.norm()).item() < limit


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_logits_stay_finite_and_right(scale: float) -> None:
    inputs = make_inputs(SMALL, Sizes(40))
    inputs["q"] = inputs["q"] * scale
    torch.testing.assert_close(nsa_attention(**inputs, spec=SMALL), paper.attention(**inputs, spec=SMALL), **TIGHT)


@pytest.mark.parametrize("tokens", [1, 5, 24])
def test_selection_of_every_block_is_dense_attention(tokens: int) -> None:
    inputs = make_inputs(NSASpec(l=4, d=2, l_sel=8, n_sel=3, w=1), Sizes(tokens))
    selected = branch_outputs(inputs, NSASpec(l=4, d=2, l_sel=8, n_sel=3, w=1))[..., 1, :]
    torch.testing.assert_close(selected, dense_attention(inputs["q"], inputs["k_sel"], inputs["v_sel"]), **TIGHT)


@pytest.mark.parametrize("window", [24, 25, 1000])
def test_a_window_over_the_whole_sequence_is_dense_attention(window: int) -> None:
    spec = NSASpec(l=4, d=2, l_sel=8, n_sel=3, w=window)
    inputs = make_inputs(spec, Sizes(24))
    expected = dense_attention(inputs["q"], inputs["k_win"], inputs["v_win"])
    torch.testing.assert_close(branch_outputs(inputs, spec)[..., 2, :], expected, **TIGHT)


def test_compression_of_single_tokens_is_dense_attention() -> None:
    spec = NSASpec(l=1, d=1, l_sel=8, n_sel=3, w=1)
    inputs = make_inputs(spec, Sizes(21))  # one token per block: identity compression
    expected = dense_attention(inputs["q"], inputs["k_cmp"], inputs["v_cmp"])
    torch.testing.assert_close(branch_outputs(inputs, spec)[..., 0, :], expected, **TIGHT)


@pytest.mark.parametrize(
    "spec", [NSASpec(4, 2, 4, 3, 3), NSASpec(2, 2, 2, 3, 5), NSASpec(4, 1, 2, 4, 1)], ids=lambda s: f"l{s.l}d{s.d}"
)
def test_gradients_pass_finite_differences(spec: NSASpec) -> None:
    inputs = make_inputs(spec, Sizes(9, groups=1, heads_per_group=2, dim=2))
    tensors = tuple(inputs[name].requires_grad_() for name in NAMES)
    assert torch.autograd.gradcheck(lambda *x: nsa_attention(*x, spec=spec), tensors)


def test_no_gradient_flows_through_selection() -> None:
    inputs = make_inputs(SMALL, Sizes(50))
    inputs["gates"] = torch.zeros_like(inputs["gates"]) + torch.tensor([0.0, 1.0, 0.0])
    k_cmp = inputs["k_cmp"].requires_grad_()
    nsa_attention(**inputs, spec=SMALL).sum().backward()
    assert not k_cmp.grad.any()


def test_queries_before_the_first_whole_block_get_exactly_zero_from_the_compressed_branch() -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    compressed = branch_outputs(inputs, SMALL)[..., 0, :]
    assert not compressed[:, : SMALL.l - 1].any()
    assert compressed[:, SMALL.l - 1 :].abs().amin(dim=(0, 2, 3)).all()


def test_a_sequence_shorter_than_a_block_gets_exactly_zero_from_the_compressed_branch() -> None:
    inputs = make_inputs(SMALL, Sizes(SMALL.l - 1))
    assert inputs["k_cmp"].shape[1] == 0
    assert not branch_outputs(inputs, SMALL)[..., 0, :].any()


def test_head_h_reads_the_keys_and_values_of_group_h_over_r() -> None:
    inputs = make_inputs(SMALL, Sizes(30, groups=3, heads_per_group=2))
    for name in ("v_cmp", "v_sel", "v_win"):
        inputs[name] = torch.arange(3.0, dtype=torch.float64)[:, None].expand_as(inputs[name])
    out = branch_outputs(inputs, SMALL)[:, SMALL.l :]  # where every branch sees something
    expected = torch.tensor([0.0, 0, 1, 1, 2, 2], dtype=torch.float64)[:, None, None].expand_as(out)
    torch.testing.assert_close(out, expected, **TIGHT)


def test_permuting_the_groups_permutes_the_heads_of_the_output() -> None:
    inputs = make_inputs(SMALL, Sizes(45, groups=3, heads_per_group=2))
    groups, heads = [2, 0, 1], [4, 5, 0, 1, 2, 3]
    permuted = {name: x[:, :, heads if name in ("q", "gates") else groups] for name, x in inputs.items()}
    out = nsa_attention(**inputs, spec=SMALL)
    torch.testing.assert_close(nsa_attention(**permuted, spec=SMALL), out[:, :, heads], **TIGHT)


def test_batch_elements_do_not_see_each_other() -> None:
    inputs = make_inputs(SMALL, Sizes(33, batch=3))
    out = nsa_attention(**inputs, spec=SMALL)
    alone = nsa_attention(**{name: x[1:2] for name, x in inputs.items()}, spec=SMALL)
    torch.testing.assert_close(out[1:2], alone, **TIGHT)


@pytest.mark.parametrize("scores_at_once", [1, 1000, 5000])
def test_walking_the_queries_in_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch, scores_at_once: int) -> None:
    inputs = make_inputs(SMALL, Sizes(53))
    whole = nsa_attention(**inputs, spec=SMALL)
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", scores_at_once)
    torch.testing.assert_close(nsa_attention(**inputs, spec=SMALL), whole, **TIGHT)


@pytest.mark.parametrize("queries_at_once", [1, 5, 16])
def test_leaving_out_the_keys_a_tile_cannot_see_changes_neither_output_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, queries_at_once: int
) -> None:
    inputs = {name: x.requires_grad_() for name, x in make_inputs(SMALL, Sizes(53)).items()}

    def output_and_gradients(at_once: dict[str, int]) -> list[Tensor]:
        monkeypatch.setattr(reference, "QUERIES_AT_ONCE", at_once)
        out = nsa_attention(**inputs, spec=SMALL)
        return [out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))]

    torch.testing.assert_close(output_and_gradients({"cpu": queries_at_once}), output_and_gradients({}), **TIGHT)


@pytest.mark.parametrize("rows", [slice(0, 5), slice(6, 9), slice(17, 40), slice(52, 53)], ids=str)
@pytest.mark.parametrize("future_keys", [True, False], ids=["future keys present", "keys end with the tile"])
def test_a_tile_of_queries_equals_its_slice_of_the_whole(rows: slice, future_keys: bool) -> None:
    x = make_inputs(SMALL, Sizes(53))
    end = 53 if future_keys else rows.stop
    k_cmp, v_cmp = (x[name][:, : SMALL.compressed_blocks(end)] for name in ("k_cmp", "v_cmp"))
    tile = x["q"][:, rows]
    first_key = max(0, rows.start - SMALL.w + 1)
    ids = reference.select_blocks(tile, k_cmp, SMALL, start=rows.start)
    branches = [
        reference.compressed_attention(tile, k_cmp, v_cmp, SMALL, start=rows.start),
        reference.selected_attention(tile, x["k_sel"][:, :end], x["v_sel"][:, :end], ids, SMALL, start=rows.start),
        reference.window_attention(
            tile, x["k_win"][:, first_key:end], x["v_win"][:, first_key:end], SMALL, rows.start, first_key
        ),
    ]
    assert torch.equal(ids, reference.select_blocks(x["q"], x["k_cmp"], SMALL)[:, rows])
    torch.testing.assert_close(torch.stack(branches, dim=-2), branch_outputs(x, SMALL)[:, rows], **TIGHT)
