"""Inputs that do not fit are refused with a message that names the tensor and the shape it should have."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tamis.attention import NSASpec, nsa_attention, select_blocks
from tamis.attention.decode import nsa_decode, tile_attention
from tamis.attention.spec import as_numbers
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
    with pytest.raises(ValueError, match="query heads must be a multiple of key/value groups, got 5 heads, 2 groups"):
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


def branch_calls() -> dict[str, tuple[Callable[..., object], dict[str, torch.Tensor]]]:
    """Every function of a branch, and inputs that fit it; batch 1, 20 tokens, 6 heads, 2 groups, dim 4."""
    from tamis.attention.kernels.gates import mix_backward
    from tamis.attention.kernels.selected.backward import selected_backward
    from tamis.attention.kernels.selected.pairs import selected_forward
    from tamis.attention.kernels.selection import select_from_lse
    from tamis.attention.op import compressed_forward, window_forward

    inputs = make_inputs(SMALL, Sizes(20), dtype=torch.float32)
    q, gates = inputs["q"], inputs["gates"]
    cmp, sel, win = ({name: inputs[name] for name in NAMES if name.endswith(kind)} for kind in ("cmp", "sel", "win"))
    ids = select_blocks(q, inputs["k_cmp"], SMALL)
    rows = {name: torch.zeros(1, 6, 20) for name in ("lse", "delta")}
    gradients = rows | {"dout": q.clone(), "dq": q.clone(), "gates": gates[..., 1]}
    outs = {name: q.clone() for name in ("cmp", "sel", "win")} | {"gates": gates}

    def selected(backward: bool, q, k_sel, v_sel, ids, **rest):  # type: ignore[no-untyped-def]
        if not backward:
            return selected_forward(q, k_sel, v_sel, ids, SMALL)
        lse, dout, gates, delta, dq = (rest[name] for name in ("lse", "dout", "gates", "delta", "dq"))
        return selected_backward(q, k_sel, v_sel, ids, lse, dout, gates, delta, dq, SMALL)

    chosen = {"q": q, **sel, "ids": ids}
    return {
        "compressed_forward": (partial(compressed_forward, spec=SMALL), {"q": q, **cmp}),
        "window_forward": (partial(window_forward, spec=SMALL), {"q": q, **win}),
        "selected_forward": (partial(selected, False), chosen),
        "selected_backward": (partial(selected, True), chosen | gradients),
        "select_from_lse": (partial(select_from_lse, spec=SMALL), {"q": q, "k_cmp": cmp["k_cmp"], "lse": rows["lse"]}),
        "mix_backward": (mix_backward, outs | {"dout": q.clone()}),
    }


CALLS = branch_calls()
INPUTS = [(call, name) for call, (_, inputs) in CALLS.items() for name in inputs]


def refusal(call: str, name: str, wrong: torch.Tensor) -> str:
    function, inputs = CALLS[call]
    with pytest.raises(ValueError) as refused:
        function(**(inputs | {name: wrong}))
    return str(refused.value)


@pytest.mark.parametrize(("call", "name"), INPUTS)
def test_a_branch_refuses_what_does_not_fit(call: str, name: str) -> None:
    """Another shape, dtype or device than expected: the message names a tensor and what it should be."""
    right = CALLS[call][1][name]
    assert name in refusal(call, name, right[..., :0])
    assert name in refusal(call, name, right[0])
    assert "must" in refusal(call, name, right.to("meta"))
    if name != "dq":  # which may be of any precision
        assert "must" in refusal(call, name, right.double())


@pytest.mark.parametrize(("call", "name"), [x for x in INPUTS if x[1] in ("lse", "delta", "dq", "cmp", "sel")])
def test_what_kernels_read_by_place_must_be_contiguous(call: str, name: str) -> None:
    right = CALLS[call][1][name]
    axes = (2, 3) if call == "selected_backward" and name == "dq" else (1, 2)  # there tokens and heads may be strided
    assert f"{name} must be" in refusal(call, name, right.transpose(*axes).contiguous().transpose(*axes))


def test_heads_of_a_query_gradient_must_lie_within_32_bits() -> None:
    # Never touched, so it takes no memory.
    far = torch.empty_strided((1, 20, 6, 4), (24, 4, 1 << 29, 1), dtype=torch.float16)
    assert "whose heads lie within 2,147,483,648 elements" in refusal("selected_backward", "dq", far)


@pytest.mark.parametrize("call", ["selected_forward", "selected_backward"])
def test_ids_out_of_range_or_out_of_order_are_refused(call: str) -> None:
    ids = CALLS[call][1]["ids"].clone()
    ids[0, 19, 1, 2] = 3
    assert "ids must lie in 0…2, the blocks there are, or be -1 where unused, got -1…3" in refusal(call, "ids", ids)
    ids[0, 19, 1] = torch.tensor([0, 1, 1, -1])
    assert "ids must be ascending, each block once" in refusal(call, "ids", ids)
    ids[0, 19, 1] = torch.tensor([-1, 0, 1, 2])  # kernels count the used slots and read that many from the first on
    assert "-1 in unused slots after them" in refusal(call, "ids", ids)
    ids[0, 0, 0, 0] = -2
    assert "got -2…2" in refusal(call, "ids", ids)


class NothingIsRead(TorchDispatchMode):
    """Fails where a value goes from the device to the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in str(function), "the host waits for a value"
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the interpreter's launches")
def test_a_training_step_looks_at_no_value_and_a_callers_ids_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op makes its own ids, so it need not wait for them; kernels are not run here, only what surrounds them."""
    from triton.runtime.interpreter import InterpretedFunction

    from tamis.attention import op

    function, chosen = CALLS["selected_forward"]
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    inputs = make_inputs(SMALL, Sizes(20), dtype=torch.float32)
    numbers = as_numbers(SMALL)
    with NothingIsRead():
        out, *saved = op.nsa_forward._init_fn(*inputs.values(), numbers)
        op.gradients(out, [*inputs.values(), *saved], numbers)
        with pytest.raises(AssertionError, match="the host waits"):
            function(**chosen)


NARROW = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
CACHED = {"compressed": 4, "selected": 20, "window": 16}  # rows for a tile of 5 queries at 15, the window's from 4 on


def tile_inputs() -> dict[str, torch.Tensor]:
    caches = {name: torch.randn(2, rows, 2, 2, 4) for name, rows in CACHED.items()}
    return {"q": torch.randn(2, 5, 6, 4), **caches, "gates": torch.rand(2, 5, 6, 3)}


@pytest.mark.parametrize("name", ["q", *CACHED, "gates"])
def test_a_tile_that_does_not_fit_its_caches_is_refused(name: str) -> None:
    inputs = tile_inputs()
    tile_attention(*inputs.values(), NARROW, 15, 4)
    for wrong in (inputs[name][:, :-1], inputs[name][1:], inputs[name].double(), inputs[name].to("meta")):
        with pytest.raises(ValueError, match="must"):
            tile_attention(*(inputs | {name: wrong}).values(), NARROW, 15, 4)


def test_a_tile_refuses_positions_whose_window_is_not_there() -> None:
    inputs = tile_inputs()
    with pytest.raises(ValueError, match="compressed must hold 3 rows, got 4"):
        tile_attention(*(inputs | {"q": inputs["q"][:, 1:], "gates": inputs["gates"][:, 1:]}).values(), NARROW, 15, 4)
    early = {name: inputs[name][:, :3] for name in inputs}  # three tokens make no compressed block yet
    with pytest.raises(ValueError, match="compressed must hold 0 rows, got 3"):
        tile_attention(*early.values(), NARROW, 0, 0)
    with pytest.raises(ValueError, match=r"first_key must lie in 0…0, .* window of 16 of the query at 15 .* got 4"):
        tile_attention(*inputs.values(), SMALL, 15, 4)
    with pytest.raises(ValueError, match="start must be the position of the first query"):
        tile_attention(*inputs.values(), NARROW, -1, 0)


def step_inputs() -> dict[str, torch.Tensor]:
    inputs = tile_inputs() | {"positions": torch.tensor([19, 3])}
    return inputs | {"q": inputs["q"][:, 0], "gates": inputs["gates"][:, 0]}


@pytest.mark.parametrize("name", ["q", *CACHED, "gates", "positions"])
def test_a_step_that_does_not_fit_its_caches_is_refused(name: str) -> None:
    inputs = step_inputs()
    nsa_decode(*inputs.values(), NARROW)
    for wrong in (inputs[name][1:], inputs[name].double(), inputs[name].to("meta"), inputs[name][None]):
        with pytest.raises(ValueError, match="must"):
            nsa_decode(*(inputs | {name: wrong}).values(), NARROW)


@pytest.mark.parametrize("name", CACHED)
def test_caches_whose_rows_do_not_lie_together_are_refused(name: str) -> None:
    """The kernels of a step go by the other strides alone, and no cache is copied for them."""
    tile, step = (inputs | {name: inputs[name].mT.contiguous().mT} for inputs in (tile_inputs(), step_inputs()))
    with pytest.raises(ValueError, match=f"{name} must have last stride 1"):
        tile_attention(*tile.values(), NARROW, 15, 4)
    with pytest.raises(ValueError, match=f"{name} must have last stride 1"):
        nsa_decode(*step.values(), NARROW)


@pytest.mark.parametrize("position", [-1, 20])
def test_a_step_beyond_its_cache_is_refused(position: int) -> None:
    inputs = step_inputs() | {"positions": torch.tensor([position, 3])}
    with pytest.raises(ValueError, match=rf"positions must lie in 0…19, the cache's, got {position}"):
        nsa_decode(*inputs.values(), NARROW)


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
