"""The steps of a tape: what a repeated call does, one after the other. `tape.py` records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import triton
from torch import Tensor


class Repetition:
    """One repetition of a tape: the tensors of its slots, and what its launches take."""

    __slots__ = ("pool", "side", "stream", "tensors")

    def __init__(self, tensors: list[Tensor | None], pool: list[Any]) -> None:
        self.tensors, self.pool = tensors, pool
        self.side: Any = None
        self.stream = 0


Step = Callable[[Repetition], None]


class Tape:
    """What a recording noted. Several threads may repeat it at once: nothing in it changes."""

    def __init__(
        self, steps: list[Step], pool: list[Any], pointers: list[tuple[int, int, int]], slots: int, results: list[int]
    ) -> None:  # fmt: skip
        self._steps, self._pool, self._pointers, self._results = steps, pool, pointers, results
        self._slots = slots

    def __call__(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> tuple[Tensor | None, ...]:
        pool = self._pool.copy()
        for index, slot, offset in self._pointers:
            pool[index] = addresses[slot] + offset
        run = Repetition([*tensors, *[None] * (self._slots - len(tensors))], pool)
        for step in self._steps:
            step(run)
        return tuple([run.tensors[slot] for slot in self._results])


class Descriptor:
    """As much of a `TensorDescriptor` as a launcher reads; its own base."""

    __slots__ = ("address", "padding", "shape", "strides")

    def __init__(self, address: int, shape: list[int], strides: list[int], padding: str) -> None:
        self.address, self.shape, self.strides, self.padding = address, shape, strides, padding

    @property
    def base(self) -> Descriptor:
        return self

    def data_ptr(self) -> int:
        return self.address


def allocation(make: Callable[[], Tensor], slot: int, pointers: list[tuple[int, int]]) -> Step:
    def step(run: Repetition) -> None:
        x = run.tensors[slot] = make()
        address, pool = x.data_ptr(), run.pool
        for index, offset in pointers:
            pool[index] = address + offset

    return step


def release(slot: int) -> Step:
    def step(run: Repetition) -> None:
        run.tensors[slot] = None

    return step


def take_current_stream(run: Repetition) -> None:
    driver = triton.runtime.driver.active
    run.stream = driver.get_current_stream(driver.get_current_device())


def launch_with_addresses(launch_at: Callable[[int, Any], None], indices: list[int]) -> Step:
    get = itemgetter(*indices)  # of several: every kernel reads and writes

    def step(run: Repetition) -> None:
        launch_at(run.stream, get(run.pool))

    return step


def description(index: int, pointer: int, shape: list[int], strides: list[int], padding: str) -> Step:
    def step(run: Repetition) -> None:
        run.pool[index] = Descriptor(run.pool[pointer], shape, strides, padding)

    return step


def begin_side_stream(make: Callable[[Any], Any], q: int) -> Step:
    def step(run: Repetition) -> None:
        run.side = make(run.tensors[q])

    return step


def wait_on_side_stream(run: Repetition) -> None:
    run.side.wait()


def on_side_stream(steps: list[Step]) -> Step:

    def step(run: Repetition) -> None:
        with run.side:
            for inner in steps:
                inner(run)

    return step


@dataclass(frozen=True)
class View:
    """A tensor of a slot, or a descriptor of it."""

    slot: int
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int  # elements
    descriptor: Any = None  # without its base

    def of(self, tensors: list[Any]) -> Any:
        slot = tensors[self.slot].detach()
        x = slot.as_strided(self.shape, self.stride, slot.storage_offset() + self.offset)
        return x if self.descriptor is None else _with_base(self.descriptor, x)


def view_like(x: Any, slot: int, offset: int) -> View:
    """Like a tensor or a descriptor, of the slot."""
    base, descriptor = (x, None) if isinstance(x, Tensor) else (x.base, _with_base(x, None))
    return View(slot, base.shape, base.stride(), offset // base.element_size(), descriptor)


def _with_base(descriptor: Any, base: Tensor | None) -> Any:
    other = copy(descriptor)
    other.base = base
    return other


def launch_with_tensors(call: Callable[..., Any], arguments: list[Any]) -> Step:
    """For the interpreter, and for launches that Triton must look at every time."""

    def step(run: Repetition) -> None:
        call(*[x.of(run.tensors) if type(x) is View else x for x in arguments])

    return step
