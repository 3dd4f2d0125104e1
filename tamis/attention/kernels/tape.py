"""Calls repeated from a tape: the allocations and launches of one call, for other tensors of the same layouts.

Which kernels a call launches, with which grids, numbers and views, depends on the layouts of its tensors and on its
numbers alone. Python finds it out while one call runs. Later calls allocate and launch what was noted.

To be repeated, a call may allocate by `empty` and `zeros`, take views, launch prepared kernels, or others by
`launch_by_triton`, and use a `SideStream`. Any other operation of torch would be missing from the tape. Such an
operation is noticed, and then all calls of this kind run the ordinary way. A launch that does not go through
`launch.py` is not noticed; a test looks for those.

A *slot* is an input or an allocation. A tensor that a kernel takes is noted as the slot that holds its address, and an
offset. Memory is released as early as without a tape: after the last launch that uses it or, if the current stream's
memory is used on a side stream, where the current stream has waited for that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from tamis.attention.kernels import tuned
from tamis.attention.kernels.repetition import (
    Step,
    Tape,
    allocation,
    begin_side_stream,
    description,
    launch_with_addresses,
    launch_with_tensors,
    on_side_stream,
    release,
    take_current_stream,
    view_like,
    wait_on_side_stream,
)

MOST_TAPES = 128
ORDINARY_CALLS = 1  # of a kind, before one is recorded: that takes four times as long, and some kinds never come again
PLAIN = (Tensor, torch.nn.Parameter)
UNKNOWN = object()

_tapes: dict[tuple[Any, ...], Tape | int | None] = {}  # or the calls so far; None for those that cannot be repeated
_thread = threading.local()  # autograd has threads of its own


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`, noted by a recording."""
    return _allocate(torch.empty, shape, dtype, device)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, noted by a recording."""
    return _allocate(torch.zeros, shape, dtype, device)


def _allocate(make: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    recording = current_recording()
    if recording is None:
        return make(shape, dtype=dtype, device=device)
    return recording.allocate(make, shape, dtype, device)


def current_recording() -> Recording | None:
    """The recording of this thread."""
    return getattr(_thread, "recording", None)


def forget() -> None:
    """Drop all tapes, for instance after a constant was changed that they depend on."""
    _tapes.clear()


def repeat(
    call: Callable[..., Any], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], layouts: Any = None
) -> Any:  # fmt: skip
    """`call(*tensors, *numbers)`, a tuple of tensors; from a tape once one was recorded for such arguments and tiles.

    Of an address only its remainder by 16 counts, and which tensors share it. `layouts` are those of the first tensors,
    if they are known. A profiler sees every launch and range: there are no tapes while one runs.
    """
    first: Any = tensors[0]
    hooks = triton.knobs.runtime
    if torch.autograd.profiler._is_profiler_enabled or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return call(*tensors, *numbers)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    remainders = [address % 16 if address else None for address in addresses]
    others = tensors[len(layouts) :] if layouts else tensors
    kinds = [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in others]
    key = (call, numbers, tuned.generation, first.device, layouts, _shared(addresses), *remainders, *kinds)
    known = _tapes.get(key, 0)
    if type(known) is Tape:
        return known(tensors, addresses)
    if type(known) is int:
        if known >= ORDINARY_CALLS and _is_recordable(tensors):
            return _record(key, call, tensors, numbers)
        _keep(key, known + 1)
    return call(*tensors, *numbers)


def _shared(addresses: list[int]) -> tuple[int, ...] | None:
    """For every tensor the first that has its address; None if all differ but those without memory."""
    differ = len(set(addresses)) + max(0, addresses.count(0) - 1) == len(addresses)
    return None if differ else tuple([addresses.index(address) for address in addresses])


def _is_recordable(tensors: Sequence[Tensor | None]) -> bool:
    given = [x for x in tensors if x is not None]
    return current_recording() is None and all(type(x) in PLAIN and not x.is_meta for x in given)


def _record(
    key: tuple[Any, ...], call: Callable[..., Any], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]
) -> Any:  # fmt: skip
    recording = Recording(tensors)
    try:
        _thread.recording = recording
        with _OtherOperations(recording):
            results = call(*tensors, *numbers)
    finally:
        _thread.recording = None
    _keep(key, recording.tape(results))
    return results


def _keep(key: tuple[Any, ...], known: Tape | int | None) -> None:
    if len(_tapes) >= MOST_TAPES and key not in _tapes:
        _tapes.clear()
    _tapes[key] = known


@dataclass
class Slot:
    """An input or an allocation."""

    tensor: Callable[[], Tensor | None]  # as long as it lives
    memory: StorageWeakRef | None  # of an allocation: a view may outlive the tensor
    begin: int  # addresses
    end: int
    dtype: torch.dtype
    layout: tuple[torch.Size, tuple[int, ...]]  # shape and strides
    level: int  # of the steps that allocate it
    pointers: list[tuple[int, int]] = field(default_factory=list)  # index in the pool, and offset in bytes

    @classmethod
    def of(cls, x: Tensor, level: int = 0, memory: StorageWeakRef | None = None) -> Slot:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        begin = x.data_ptr()
        end = begin + (reach * x.element_size() if x.numel() else 0)
        return cls(weakref.ref(x), memory, begin, end, x.dtype, (x.shape, x.stride()), level)

    def holds(self, address: int, dtype: torch.dtype) -> bool:
        alive = self.memory is None or not self.memory.expired()
        return alive and self.dtype == dtype and (self.begin <= address < self.end or self.begin == address)


class Recording:
    """Notes what a call does. It keeps no memory alive: a slot counts as long as its memory is in use."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._slots = [None if x is None else Slot.of(x) for x in tensors]
        self._inputs = len(tensors)
        self._levels: list[list[Step]] = [[]]  # those of a side stream are one step of the current stream's
        self._last_use: dict[int, tuple[list[Step], int]] = {}
        self._pool: list[Any] = []
        self._indices: dict[Any, int] = {}  # in the pool
        self._is_usable, self._is_noted, self._has_stream = True, False, False

    def give_up(self) -> None:
        """The call did what a tape cannot repeat."""
        self._is_usable = False

    def see_operation(self) -> None:
        """An operation of torch that is no view."""
        self._is_usable = self._is_usable and self._is_noted

    def allocate(
        self, make: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:  # fmt: skip
        with self._noted():
            x = make(shape, dtype=dtype, device=device)
        index, slot = len(self._slots), Slot.of(x, len(self._levels) - 1, StorageWeakRef(x.untyped_storage()))
        self._slots.append(slot)
        self._use(index)
        again = partial(make, x.shape, dtype=dtype, device=device)
        if make is torch.empty:  # the same in half the time
            again = partial(torch.empty_strided, x.shape, x.stride(), dtype=dtype, device=device)
        self._levels[-1].append(allocation(again, index, slot.pointers))
        return x

    def launch(self, prepared: Any, arguments: Sequence[Any]) -> None:
        """Launch a `PreparedLaunch`. It is repeated with addresses, or with tensors by the interpreter."""
        with self._noted():
            prepared(*arguments)
        if not prepared.is_compiled and arguments[0].device.type != "cpu":
            self.give_up()
        self._append_launch(prepared, arguments, prepared.at if prepared.is_compiled else None)

    def launch_by_triton(self, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Launch what Triton must look at every time."""
        with self._noted():
            call(*arguments)
        self._append_launch(call, arguments, None)

    def _append_launch(self, call: Callable[..., Any], arguments: Sequence[Any], launch_at: Any) -> None:
        found = [self._find(x if isinstance(x, Tensor) else getattr(x, "base", None)) for x in arguments]
        if UNKNOWN in found:
            self.give_up()
            return
        placed = list(zip(arguments, found, strict=True))
        if launch_at is None:
            step = launch_with_tensors(call, [x if at is None else view_like(x, *at) for x, at in placed])
        else:
            if not self._has_stream:
                self._levels[-1].append(take_current_stream)
                self._has_stream = True
            step = launch_with_addresses(launch_at, [self._index(x, at) for x, at in placed])
        for at in found:
            if at is not None:
                self._use(at[0])
        self._levels[-1].append(step)

    def begin_side(self, make: Callable[[Tensor], Any], q: Tensor) -> None:
        """A side stream is made, of queries that are an input."""
        inputs = [i for i, slot in enumerate(self._slots) if slot and slot.tensor() is q]
        self._is_usable = self._is_usable and bool(inputs)
        self._levels[-1].append(begin_side_stream(make, inputs[0] if inputs else 0))

    def enter_side(self) -> None:
        self._levels.append([])
        self._has_stream = False

    def wait_on_side(self) -> None:
        self._levels[-1].append(wait_on_side_stream)

    def leave_side(self) -> None:
        steps = self._levels.pop()
        self._levels[-1].append(on_side_stream(steps))
        self._has_stream = False

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """The tape, if the call can be repeated."""
        slot_of = {id(x): i for i, slot in enumerate(self._slots) if slot and (x := slot.tensor()) is not None}
        returned = [slot_of.get(id(x), -1) for x in results]
        if not self._is_usable or -1 in returned:
            return None
        releases = [(steps, at, slot) for slot, (steps, at) in self._last_use.items() if slot not in returned]
        for steps, at, slot in sorted(releases, key=itemgetter(1), reverse=True):  # from the end, where none is moved
            steps.insert(at + 1, release(slot))
        given = enumerate(self._slots[: self._inputs])
        pointers = [(index, i, offset) for i, slot in given if slot for index, offset in slot.pointers]
        return Tape(self._levels[0], self._pool, pointers, len(self._slots), returned)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """What happens inside is on the tape."""
        before, self._is_noted = self._is_noted, True
        try:
            yield
        finally:
            self._is_noted = before

    def _use(self, slot: int) -> None:
        """By the step that is appended next."""
        x = self._slots[slot]
        if x is not None and slot >= self._inputs:
            steps = self._levels[min(x.level, len(self._levels) - 1)]
            self._last_use[slot] = steps, len(steps)

    def _find(self, x: Tensor | None) -> Any:
        """Slot and offset in bytes; None if it is no tensor, UNKNOWN if it is in no slot, or not clear in which."""
        if x is None:
            return None
        address, slots = x.data_ptr(), enumerate(self._slots)
        near = [(i, slot) for i, slot in slots if slot and slot.holds(address, x.dtype)]
        if address and len(near) > 1:  # inputs may overlap: a view of one may begin where another does
            near = [(i, slot) for i, slot in near if slot.begin == address and slot.layout == (x.shape, x.stride())]
        return (near[0][0], address - near[0][1].begin) if near else UNKNOWN

    def _index(self, x: Any, at: tuple[int, int] | None) -> int:
        """Where a launch finds an argument in the pool."""
        key = (type(x), x) if at is None else at
        if key not in self._indices:
            self._indices[key] = len(self._pool)
            self._pool.append(x if at is None else 0)
            slot = self._slots[at[0]] if at else None
            if at and slot:
                slot.pointers.append((self._indices[key], at[1]))
        return self._indices[key] if at is None or isinstance(x, Tensor) else self._describe(x, self._indices[key])

    def _describe(self, descriptor: Any, pointer: int) -> int:
        """A fresh one for each launch: two may lie in one place and have other shapes."""
        self._pool.append(None)
        like = descriptor.shape, descriptor.strides, descriptor.padding
        self._levels[-1].append(description(len(self._pool) - 1, pointer, *like))
        return len(self._pool) - 1


class _OtherOperations(TorchDispatchMode):
    """Tells a recording of the operations that are not on its tape.

    Other modes also set flags of the whole process, which would send the calls of other threads through the dispatcher
    and keep torch.compile from compiling: for ever, if two threads begin to record before one of them ends.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __enter__(self) -> _OtherOperations:
        _push_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self._recording.see_operation()
        return function(*args, **(kwargs or {}))
