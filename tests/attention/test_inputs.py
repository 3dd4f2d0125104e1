"""Inputs that do not fit are refused with a message that names the tensor and the shape it should have."""

import pytest
import torch

from tamis.attention import NSASpec, nsa_attention, select_blocks
from tests.attention.inputs import NAMES, SMALL, Sizes, make_inputs

EXPECTED = {name: [1, 20, 2, 4] for name in ("k_sel", "v_sel", "k_win", "v_win")} | {
    "k_cmp": [1, 4, 2, 4],
    "v_cmp": [1, 4, 2, 4],
    "gates": [1, 20, 6, 3],
}


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_wrong_shape_is_named_with_the_expected_one(name: str, axis: int) -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    inputs[name] = torch.cat([inputs[name], inputs[name]], dim=axis)
    with pytest.raises(ValueError) as refusal:
        nsa_attention(**inputs, spec=SMALL)
    assert name in str(refusal.value)
    assert str(EXPECTED[name]) in str(refusal.value)
    assert str(list(inputs[name].shape)) in str(refusal.value)


@pytest.mark.parametrize("name", NAMES[1:])
def test_another_dtype_or_device_than_the_queries_is_named(name: str) -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    with pytest.raises(ValueError, match=rf"{name} must have q's dtype torch.float64, got torch.float32"):
        nsa_attention(**(inputs | {name: inputs[name].float()}), spec=SMALL)
    with pytest.raises(ValueError, match=rf"{name} must be on q's device cpu, got meta"):
        nsa_attention(**(inputs | {name: inputs[name].to("meta")}), spec=SMALL)


def test_a_missing_dimension_is_refused() -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    for name in NAMES:
        with pytest.raises(ValueError, match=name):
            nsa_attention(**(inputs | {name: inputs[name][0]}), spec=SMALL)


def test_heads_that_the_groups_do_not_divide_are_refused() -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    inputs["q"] = inputs["q"][:, :, :5]
    with pytest.raises(
        ValueError, match="query heads must be a multiple of key/value groups, got 5 heads and 2 groups"
    ):
        select_blocks(inputs["q"], inputs["k_cmp"], SMALL)


def test_an_empty_sequence_and_whole_number_queries_are_refused() -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    with pytest.raises(ValueError, match=r"q .* no empty dimension"):
        select_blocks(inputs["q"][:, :0], inputs["k_cmp"][:, :0], SMALL)
    with pytest.raises(ValueError, match="q must be a floating-point tensor"):
        select_blocks(inputs["q"].int(), inputs["k_cmp"].int(), SMALL)


def test_the_number_of_compressed_blocks_must_follow_from_the_length() -> None:
    inputs = make_inputs(SMALL, Sizes(20))
    with pytest.raises(ValueError, match=r"k_cmp must have shape \[1, 4, 2, 4\].*got \[1, 3, 2, 4\]"):
        select_blocks(inputs["q"], inputs["k_cmp"][:, :3], SMALL)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"l": 33}, "nsa.l must be a multiple of nsa.d"),
        ({"l": 8}, "nsa.l must be a multiple of nsa.d"),
        ({"l_sel": 40}, "nsa.l_sel must be a multiple of nsa.d"),
        ({"n_sel": 2}, "nsa.n_sel must be at least 3"),
        ({"w": 0}, "nsa.w must be a whole number of at least 1"),
        ({"d": -16}, "nsa.d must be a whole number of at least 1"),
        ({"w": 512.0}, "nsa.w must be a whole number"),
        ({"w": True}, "nsa.w must be a whole number"),
    ],
)
def test_an_impossible_geometry_is_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NSASpec(**changed)


def test_the_geometry_counts_blocks_as_stated() -> None:
    spec = NSASpec(l=32, d=16, l_sel=64, n_sel=16, w=512)
    assert [spec.compressed_blocks(s) for s in (1, 31, 32, 47, 48, 2048)] == [0, 0, 1, 1, 2, 127]
    assert [spec.visible_compressed(t) for t in (0, 30, 31, 46, 47)] == [0, 0, 1, 1, 2]
    assert [spec.selection_blocks(s) for s in (1, 64, 65, 2048)] == [1, 1, 2, 32]
    assert [spec.last_token(i) for i in (0, 1, 2)] == [31, 47, 63]
