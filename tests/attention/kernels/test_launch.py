"""A prepared launch asks Triton once, and launches with the addresses of each call's tensors."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tests.attention.devices import DEVICE

# After devices, which sets up the interpreter.
from tamis.attention.kernels import launch as launch_module  # isort: skip
from tamis.attention.kernels.hopper.descriptors import LINE, TensorDescriptor  # isort: skip
from tamis.attention.kernels.launch import MOST_PREPARED, PreparedKernel, PreparedLaunch, SideStream, _streams_of  # isort: skip
from tamis.attention.kernels.launch import softmax_scale  # isort: skip


class Compiled:
    """As much of a compiled kernel as a launch needs."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.seen_by_hooks: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.seen_by_hooks.append(arguments)


class Kernel:
    arg_names = ("x", "out", "scale", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.compiled, self.asked = Compiled(), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.asked += 1
            return self.compiled

        return launch


class Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 99


def test_later_launches_carry_addresses_and_the_present_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    kernel = Kernel()
    launch = PreparedLaunch(kernel, (5, 6, 1), (0.5,), {"SECOND": 2, "FIRST": 1, "num_warps": 4})
    for _ in range(3):
        x, out = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        launch(x, out)
    assert kernel.asked == 1
    assert len(kernel.compiled.launched) == 2
    hooks = (None, None, None)
    expected = (5, 6, 1, 99, 7, (4, 1, 0), *hooks, x.data_ptr(), out.data_ptr(), 0.5, 1, 2)
    assert kernel.compiled.launched[-1] == expected


def test_a_launch_counts_as_compiled_when_all_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may launch as soon as it does."""
    launch = PreparedLaunch(Kernel(), (1,), (0.5,), {"FIRST": 1, "SECOND": 2})
    find, too_early = launch_module._launcher_of, []

    def noted(compiled: Any) -> Any:
        too_early.append(launch.is_compiled)
        return find(compiled)

    monkeypatch.setattr(launch_module, "_launcher_of", noted)
    x = torch.zeros(4, device=DEVICE)
    launch(x, x)
    assert launch.is_compiled and too_early == [False]


def test_a_scale_is_a_float() -> None:
    """Else 2.0 would be launched as a kernel that was compiled for the whole number 2."""
    x = torch.zeros(4, 16)
    assert [type(softmax_scale(x, scale)) for scale in (None, 2, 2.0)] == [float] * 3


def test_a_profilers_hooks_see_every_launch() -> None:
    kernel, hook = Kernel(), print
    launch = PreparedLaunch(kernel, (1, 1, 1), (0.5,), {"FIRST": 1, "SECOND": 2})
    x = torch.zeros(4, device=DEVICE)
    launch(x, x)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(x, x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert kernel.compiled.seen_by_hooks == [(x, x, 0.5, 1, 2)]
    assert kernel.compiled.launched == []


def test_a_kernel_is_prepared_again_for_what_triton_would_compile_or_launch_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    kernel = Kernel()
    prepared, x = PreparedKernel(kernel), torch.zeros(64, device=DEVICE)
    constants = {"FIRST": 1, "SECOND": 2}
    alike = [(1,), x, x[4:], 0.5, constants]
    changed = [
        alike,
        [(2,), x, x, 0.5, constants],
        [(1,), x.half(), x, 0.5, constants],
        [(1,), x[1:], x, 0.5, constants],  # no multiple of 16
        [(1,), x, None, 0.5, constants],
        [(1,), x, x, 0.25, constants],
        [(1,), x, x, 0.5, constants | {"FIRST": 3}],
        [(1,), x, x, 0.5, constants | {"num_warps": 8}],
    ]
    for _ in range(2):
        for grid, *arguments, values in changed:
            prepared[grid](*arguments, **values)
    assert kernel.asked == len(changed)
    boxes = [TensorDescriptor(x, [1, 64], [64, 1], [1, size], LINE) for size in (64, 32, 32)]
    for box in boxes:
        prepared[(1,)](x, box, 0.5, **constants)
    assert kernel.asked == len(changed) + 2  # of another size
    assert kernel.compiled.launched[-1][-4] is boxes[-1]
    kernel.asked = len(changed)
    prepared[(1,)](x, x, 0.5, COPIED=True)
    prepared[(1,)](x, x, 0.5, COPIED=True)
    assert kernel.asked == len(changed) + 2  # the tensors' descriptors are made at every launch


def test_a_side_stream_waits_for_the_current_one_and_the_current_one_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Stream:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.name = "side" if options else "current"

    class Event:
        def record(self, stream: Stream) -> None:
            happened.append(f"record {stream.name}")

        def wait(self, stream: Stream) -> None:
            happened.append(f"wait {stream.name}")

    current = Stream()
    fakes = {
        "Stream": Stream, "Event": Event, "current_stream": lambda device: current, "current_device": lambda: 77,
        "set_stream": lambda stream: happened.append(f"set {stream.name}"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 123, raising=False)
    q = SimpleNamespace(is_cuda=True, shape=(2, 8, 4, 64), get_device=lambda: 77)
    for fails in (False, True):
        happened.clear()
        side: Any = SideStream(q)  # type: ignore[arg-type]
        happened.append("launch")
        with suppress(ValueError), side:
            happened.append("launch aside")
            side.wait()  # for what the current stream was given since
            if fails:
                raise ValueError
        forked = ["record current", "launch", "wait side", "set side", "launch aside", "record current", "wait side"]
        assert happened == [*forked, "set current", "record side", "wait current"]
    _streams_of.cache_clear()


def test_launches_that_never_come_again_do_not_pile_up() -> None:
    prepared, x = PreparedKernel(Kernel()), torch.zeros(4, device=DEVICE)
    for number in range(3 * MOST_PREPARED):
        prepared[(1,)](x, x, number, FIRST=1, SECOND=2)
    assert len(prepared._launches) <= MOST_PREPARED
