"""A prepared launch asks Triton once, and launches with the addresses of each call's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from tests.attention.devices import DEVICE

# After devices, which sets up the interpreter.
from tamis.attention.kernels.launch import PreparedLaunch  # isort: skip


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
    launch = PreparedLaunch(kernel, (5, 6, 1), (0.5,), {"SECOND": 2, "FIRST": 1}, {"num_warps": 4})
    for _ in range(3):
        x, out = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        launch(x, out)
    assert kernel.asked == 1
    assert len(kernel.compiled.launched) == 2
    hooks = (None, None, None)
    expected = (5, 6, 1, 99, 7, (4, 1, 0), *hooks, x.data_ptr(), out.data_ptr(), 0.5, 1, 2)
    assert kernel.compiled.launched[-1] == expected


def test_a_profilers_hooks_see_every_launch() -> None:
    kernel, hook = Kernel(), print
    launch = PreparedLaunch(kernel, (1, 1, 1), (0.5,), {"FIRST": 1, "SECOND": 2}, {})
    x = torch.zeros(4, device=DEVICE)
    launch(x, x)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(x, x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert kernel.compiled.seen_by_hooks == [(x, x, 0.5, 1, 2)]
    assert kernel.compiled.launched == []
