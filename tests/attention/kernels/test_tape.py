"""Calls repeated from a tape give the bits of ordinary ones, and only calls that are alike are repeated."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.attention.devices import DEVICE, random_inputs

# After devices, which sets up the interpreter.
from tamis.attention import NSASpec, nsa_attention, op, select_blocks  # isort: skip
from tamis.attention.kernels import best_blocks, gates, selection, tape, tuned  # isort: skip
from tamis.attention.kernels.banded import keys, keys_on_hopper, queries, queries_on_hopper, statistics  # isort: skip
from tamis.attention.kernels.hopper import boxes, scores  # isort: skip
from tamis.attention.kernels.hopper.descriptors import LINE, TensorDescriptor  # isort: skip
from tamis.attention.kernels.launch import PreparedKernel  # isort: skip
from tamis.attention.kernels.selected import backward, lists, pairs, pairs_on_hopper, union, union_on_hopper  # isort: skip
from tamis.attention.kernels.repetition import Tape  # isort: skip
from tamis.attention.kernels.tiles import Tile  # isort: skip
from tests.attention.kernels.test_launch import Driver, Kernel  # isort: skip

SPEC = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
SHAPE = {"tokens": 45, "groups": 1, "heads_per_group": 4}


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "ORDINARY_CALLS", 0)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tapes that were repeated."""
    seen: list[Tape] = []
    again = Tape.__call__
    monkeypatch.setattr(Tape, "__call__", lambda self, *arguments: seen.append(self) or again(self, *arguments))
    return seen


def both_ways(inputs: list[Tensor], spec: NSASpec = SPEC, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = nsa_attention(*leaves, spec, backend="triton", return_lse=True, **options)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, torch.ones_like(out).sin())]


def ordinary(inputs: list[Tensor], spec: NSASpec = SPEC, **options: Any) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "repeat", lambda call, tensors, numbers, layouts=None: call(*tensors, *numbers))
        return both_ways(inputs, spec, **options)


def packed(inputs: list[Tensor]) -> dict[str, Any]:
    return {"cu_seqlens": torch.tensor([0, 9, 40, 45], dtype=torch.int32, device=DEVICE), "max_seqlen": 31}


def chosen(inputs: list[Tensor]) -> dict[str, Any]:
    return {"block_ids": select_blocks(inputs[0].flip(1), inputs[1], SPEC, backend="triton")}


def scaled(inputs: list[Tensor]) -> dict[str, Any]:
    return {"scale": 0.3}


@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize("options", [packed, chosen, scaled])
def test_a_repeated_call_gives_the_bits_of_an_ordinary_one(
    repeated: list[Tape], monkeypatch: pytest.MonkeyPatch, options: Callable[..., dict[str, Any]], copied: bool
) -> None:
    if options is scaled:  # tiles with short unions, and lists of pairs for the others
        monkeypatch.setattr(pairs, "DENSE_UP_TO", 0)
    if copied:
        if DEVICE == "cuda":
            pytest.skip("a GPU copies at head dim 128 alone")
        for module in (queries, keys, selection, union):
            monkeypatch.setattr(module, "copies_tiles", lambda heads, *tensors: all(x.numel() > 0 for x in tensors))
        monkeypatch.setattr(backward, "takes_halves", lambda *args: True)
    made = [options(inputs) for inputs in map(inputs_of, range(3))]
    results = [both_ways(inputs_of(seed), **made[seed]) for seed in range(3)]
    assert len(repeated) == 4, "two calls, forward and backward"
    for seed in range(3):
        for got, expected in zip(results[seed], ordinary(inputs_of(seed), **made[seed]), strict=True):
            assert torch.equal(got, expected)
    addresses = [x.untyped_storage().data_ptr() for result in results for x in result]
    assert len(set(addresses)) == len(addresses), "results share no memory"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("graph", [False, True])
def test_kernels_with_descriptors_and_a_side_stream_are_repeated(repeated: list[Tape], graph: bool) -> None:
    shape = {"batch": 4, "tokens": 2048, "heads_per_group": 6, "dim": 64, "dtype": torch.bfloat16}
    given = [random_inputs(NSASpec(), seed=seed, **shape) for seed in range(3)]
    expected = [ordinary(inputs, NSASpec()) for inputs in given]
    both_ways(given[0], NSASpec())
    torch.cuda.synchronize()
    for inputs, wanted in zip(given, expected, strict=True):
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded) if graph else nullcontext():
            results = both_ways(inputs, NSASpec())
        if graph:
            recorded.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
    assert len(repeated) == 6


def inputs_of(seed: int) -> list[Tensor]:
    """Queries and gates lie apart, as parts of a larger tensor."""
    inputs = random_inputs(SPEC, seed=seed, **SHAPE)
    return [torch.cat([x, x], 3)[..., : x.shape[3]] if index in (0, 7) else x for index, x in enumerate(inputs)]


def test_other_arguments_are_not_repeated(repeated: list[Tape]) -> None:
    inputs = random_inputs(SPEC, **SHAPE)
    both_ways(inputs)
    moved = inputs[0].detach().new_empty(inputs[0].numel() + 1)[1:].view_as(inputs[0]).copy_(inputs[0].detach())
    strided = inputs[0].detach().transpose(1, 2).contiguous().transpose(1, 2)
    others = [random_inputs(SPEC, tokens=44, groups=1, heads_per_group=4)]
    others += [[moved, *inputs[1:]], [strided, *inputs[1:]], with_two_alike(inputs)]
    for other in others:
        both_ways(other)
    both_ways(inputs, scale=0.5)
    assert not repeated
    both_ways(with_two_alike(random_inputs(SPEC, seed=1, **SHAPE)))
    assert len(repeated) == 2
    with tuned.using({"forward": Tile(32, 32, 4, 1)}):
        both_ways(inputs)
    assert len(repeated) == 2


def with_two_alike(inputs: list[Tensor]) -> list[Tensor]:
    """The window branch reads the keys and values of the selected one."""
    return [*inputs[:5], *inputs[3:5], inputs[7]]


def test_a_view_that_begins_where_another_input_does_is_not_taken_for_it(repeated: list[Tape]) -> None:
    inputs = [x.detach() for x in random_inputs(SPEC, **SHAPE)]
    values, gates = inputs[6], inputs[7]
    memory = torch.rand(2 * gates.numel() + values.numel() + 16, device=DEVICE)
    inputs[7] = memory[: gates.numel()].view_as(gates)
    for begin in (1, gates.numel() + -gates.numel() % 4 + 1):  # at the gate of the selected branch, then apart
        inputs[6] = memory[begin:][: values.numel()].view_as(values)
        for got, expected in zip(both_ways(inputs), ordinary(inputs), strict=True):
            assert torch.equal(got, expected)
    assert len(repeated) == 1, "forward, where no kernel takes that view"


def test_tensors_without_memory_are_repeated(repeated: list[Tape]) -> None:
    for seed in range(2):
        inputs = random_inputs(SPEC, tokens=SPEC.l - 1, groups=1, heads_per_group=4, seed=seed)  # no block
        results = both_ways(inputs)
    assert len(repeated) == 2
    assert all(torch.equal(x, y) for x, y in zip(results, ordinary(inputs), strict=True))


def test_a_profiler_sees_every_launch(repeated: list[Tape]) -> None:
    inputs = random_inputs(SPEC, **SHAPE)
    both_ways(inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        both_ways(inputs)
    assert not repeated


def doubled(x: Tensor, in_place: bool) -> tuple[Tensor]:
    out = tape.empty(x.shape, x.dtype, x.device)
    out.copy_(x * 2) if in_place else tape.zeros(x.shape, x.dtype, x.device)
    return (out,)


def test_operations_of_torch_make_no_tape() -> None:
    for seed in range(3):
        x = torch.full((4,), float(seed))
        assert torch.equal(tape.repeat(doubled, (x,), (True,))[0], x * 2)
    assert list(tape._tapes.values()) == [None]
    tape.repeat(doubled, (x,), (False,))
    assert type(list(tape._tapes.values())[1]) is Tape


def test_a_recording_is_a_matter_of_its_thread() -> None:
    """The flags of a dispatch mode count for all threads, and two that overlap leave them set."""
    seen = []

    def call(x: Tensor) -> tuple[Tensor]:
        seen.append(is_in_torch_dispatch_mode())
        return (tape.empty(x.shape, x.dtype, x.device),)

    tape.repeat(call, (torch.zeros(4),), ())
    assert seen == [False]


def test_a_call_that_fails_leaves_no_recording() -> None:
    def fail(x: Tensor) -> tuple[Tensor]:
        tape.empty(x.shape, x.dtype, x.device)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tape.repeat(fail, (torch.zeros(4),), ())
    assert tape.current_recording() is None and not tape._tapes
    assert torch._C._len_torch_dispatch_stack() == 0


def test_every_kernel_of_a_call_is_launched_where_a_tape_notices_it() -> None:
    dense, selected = (
        (keys, keys_on_hopper, queries, queries_on_hopper, statistics, boxes, scores),
        (backward, lists, pairs, pairs_on_hopper, union, union_on_hopper),
    )
    for module in (op, gates, selection, best_blocks, *dense, *selected):
        source = inspect.getsource(module)
        launched = {name for name in re.findall(r"\b(\w+)\[[^\n]*\]\(", source) if hasattr(module, name)}
        assert all(isinstance(getattr(module, name), PreparedKernel) for name in launched), module


def test_a_call_is_recorded_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "ORDINARY_CALLS", 1)
    kinds = []
    for _ in range(3):
        tape.repeat(doubled, (torch.zeros(4),), (False,))
        kinds.append([type(known) for known in tape._tapes.values()])
    assert kinds == [[int], [Tape], [Tape]]


@pytest.mark.parametrize("ordinary_calls", [0, 1])
def test_calls_that_never_come_again_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, ordinary_calls: int) -> None:
    monkeypatch.setattr(tape, "ORDINARY_CALLS", ordinary_calls)
    for size in range(3 * tape.MOST_TAPES):
        tape.repeat(doubled, (torch.zeros(size),), (False,))
    assert len(tape._tapes) <= tape.MOST_TAPES


class Side:
    """As much of a side stream as a tape needs, which notes what happens."""

    events: ClassVar[list[str]] = []

    def __init__(self, x: Tensor) -> None:
        self.events.append("begin")
        if recording := tape.current_recording():
            recording.begin_side(Side, x)

    def __enter__(self) -> None:
        self.events.append("enter")
        if recording := tape.current_recording():
            recording.enter_side()

    def wait(self) -> None:
        self.events.append("wait")
        if recording := tape.current_recording():
            recording.wait_on_side()

    def __exit__(self, *exception: object) -> None:
        self.events.append("leave")
        if recording := tape.current_recording():
            recording.leave_side()


def test_compiled_kernels_are_launched_with_addresses_and_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(Side, "events", [])
    kernel = Kernel()
    prepared = PreparedKernel(kernel)
    launched = kernel.compiled.launched

    def call(x: Tensor, y: Tensor) -> tuple[Tensor]:
        out, parts = tape.empty((8,), x.dtype, x.device), tape.empty((2, 4), x.dtype, x.device)
        side = Side(x)
        prepared[(5,)](x, out[4:], 0.5, FIRST=1, SECOND=2)
        with side:
            described = TensorDescriptor(y[4:], [1, 4], [4, 1], [1, 4], LINE)
            side.wait()
            prepared[(5,)](parts[1], described, 0.5, FIRST=1, SECOND=2)
        return (out,)

    tape.repeat(call, (torch.zeros(16), torch.zeros(16)), ())
    assert Side.events == ["begin", "enter", "wait", "leave"]
    launched.clear()
    x, y = torch.zeros(16), torch.zeros(16)
    (out,) = tape.repeat(call, (x, y), ())
    assert Side.events == ["begin", "enter", "wait", "leave"] * 2
    first, second = launched
    assert first[:6] == (5, 1, 1, 99, 7, (4, 1, 0)) and first[9:] == (x.data_ptr(), out[4:].data_ptr(), 0.5, 1, 2)
    descriptor = second[10]
    assert descriptor.base.data_ptr() == y[4:].data_ptr() and second[9] % 16 == 0
    assert (descriptor.shape, descriptor.strides, descriptor.padding) == ([1, 4], [4, 1], "zero")

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no launch")

    Side.events.clear()
    list(prepared._launches.values())[1]._run = fail
    with pytest.raises(RuntimeError, match="no launch"):
        tape.repeat(call, (x, y), ())
    assert Side.events == ["begin", "enter", "wait", "leave"]


def test_memory_is_released_after_its_last_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the current stream that a side stream uses is kept until that is done; other memory is not."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    kernel = Kernel()
    prepared = PreparedKernel(kernel)

    def call(x: Tensor) -> tuple[Tensor]:
        out, used_aside, short = (tape.empty((4,), x.dtype, x.device) for _ in range(3))
        prepared[(1,)](x, short, 0.5, FIRST=1, SECOND=2)
        with Side(x):
            prepared[(1,)](used_aside, out, 0.5, FIRST=1, SECOND=2)
            prepared[(1,)](x, out, 0.5, FIRST=1, SECOND=2)
        prepared[(1,)](x, out, 0.5, FIRST=1, SECOND=2)
        return (out,)

    made: list[Any] = []
    alive: list[list[bool]] = []
    make = torch.empty_strided

    def noted(*arguments: Any, **options: Any) -> Tensor:
        x = make(*arguments, **options)
        made.append(weakref.ref(x))
        return x

    monkeypatch.setattr(torch, "empty_strided", noted)
    monkeypatch.setattr(kernel.compiled, "run", lambda *arguments: alive.append([x() is not None for x in made]))
    tape.repeat(call, (torch.zeros(4),), ())
    alive.clear()
    tape.repeat(call, (torch.zeros(4),), ())
    assert alive == [[True, True, True], *[[True, True, False]] * 2, [True, False, False]]
