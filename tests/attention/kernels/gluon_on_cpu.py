"""Run Gluon kernels on the CPU: their Python with torch in place of Gluon, and a thread for each group of warps.

Triton has no interpreter for Gluon. Barriers, copies and what lies beyond a tensor's end behave as on the device. A
product is complete when it is issued: that the device waits for it is not shown here.
"""

from __future__ import annotations

import math
import threading
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

PATIENCE_S = 60
program: tuple[int, ...] = ()  # the one that runs, and how many there are
programs: tuple[int, ...] = ()


class Barrier:
    """A phase ends when all have arrived and all bytes that are expected have been copied."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._missing = self._bytes = self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._missing = count

    def change(self, arrived: int, expected_bytes: int) -> None:
        with self._changed:
            self._missing -= arrived
            self._bytes += expected_bytes
            assert self._missing >= 0, "more have arrived than the barrier counts"
            if self._missing == 0 and self._bytes == 0:
                self._missing, self._phase = self._count, self._phase + 1
                self._changed.notify_all()

    def wait(self, parity: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._phase % 2 != parity, PATIENCE_S), "a barrier is never passed"


class Shared:
    """Tiles in shared memory, NaN until they are written."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.dtype = getattr(values, "dtype", None)

    def index(self, i: Any) -> Any:
        chosen = self.values[int(i)]
        return chosen if isinstance(chosen, Barrier) else Shared(chosen)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def load(self, layout: object) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.values.copy_(values)


class Pointer:
    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + offset)


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> Tensor:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    return torch.where(mask, pointer.flat[at.long().where(mask, 0)], other)


def store(pointer: Pointer, values: Tensor, mask: Any, cache_modifier: str = "") -> None:
    at, mask, values = torch.broadcast_tensors(pointer.offset, mask, values)
    pointer.flat[at[mask].long()] = values[mask]


def _inside(described: Any, place: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
    """What exists of a box: the part of the tensor, and where it lies in the box."""
    assert int(place[-1]) * described.base.element_size() % 16 == 0, "an illegal instruction"
    tensor = described.base.as_strided(described.shape, described.strides)
    limits = zip(map(int, place), described.block_shape, tensor.shape, strict=True)
    bounds = [(at, max(0, at), max(0, min(at + size, end))) for at, size, end in limits]
    part = tensor[tuple(slice(begin, end) for _, begin, end in bounds)]
    return part, tuple(slice(begin - at, begin - at + n) for (at, begin, _), n in zip(bounds, part.shape, strict=True))


def copy(described: Any, place: list[Any], barrier: Barrier, into: Shared, pred: Any = True) -> None:
    """A box of a tensor, zeros where there is none. The device stops at a copy that begins off 16 bytes."""
    if not pred:
        return
    part, there = _inside(described, place)
    box = torch.zeros(described.block_shape, dtype=part.dtype)
    box[there] = part
    into.values.copy_(box)
    barrier.change(0, -box.numel() * box.element_size())


def copy_back(described: Any, place: list[Any], box: Shared) -> None:
    """The part of a box that lies in the tensor."""
    part, there = _inside(described, place)
    part.copy_(box.values[there])


def multiply(a: Any, b: Any, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left, right = ((x.values if isinstance(x, Shared) else x).float() for x in (a, b))
    return left @ right + (acc if use_acc else 0)


def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
    if dtype == torch.int64:
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, math.nan, dtype=dtype))


def run_together(parts: list[tuple[Any, tuple[Any, ...]]], *sizes: object) -> None:
    failures: list[BaseException] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            with torch.no_grad():  # which holds for one thread
                function(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _either(choose: Any) -> Any:
    return lambda a, b: choose(torch.as_tensor(a), torch.as_tensor(b))


LANGUAGE = SimpleNamespace(
    int32=torch.int32, uint32=torch.int64, int64=torch.int64, bfloat16=torch.bfloat16, float32=torch.float32,
    constexpr=object,
    program_id=lambda axis: torch.tensor(program[axis]), num_programs=lambda axis: programs[axis],
    arange=lambda begin, end, layout: torch.arange(begin, end), static_range=range, to_tensor=int,
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    maximum=_either(torch.maximum), minimum=_either(torch.minimum), where=torch.where,
    max=lambda x, dim: x.amax(dim), sum=lambda x, dim: x.sum(dim), exp2=torch.exp2, log2=torch.log2,
    convert_layout=lambda x, layout: x, load=load, store=store, allocate_shared_memory=allocate,
    thread_barrier=lambda: None, warp_specialize=run_together,
    DistributedLinearLayout=lambda **a: a, BlockedLayout=lambda *a: a, SliceLayout=lambda *a: a,
    NVMMASharedLayout=lambda **a: a, NVMMADistributedLayout=lambda **a: a, DotOperandLayout=lambda **a: a,
)  # fmt: skip
BARRIERS = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, phase: barrier.wait(int(phase)),
    expect=lambda barrier, size, pred=True: barrier.change(1, size) if pred else None,
    arrive=lambda barrier, pred=True: barrier.change(1, 0) if pred else None,
)

COPIES = SimpleNamespace(
    async_copy_global_to_shared=copy, async_copy_shared_to_global=copy_back, store_wait=lambda pending: None
)


class CpuKernel:
    """A kernel that is launched as Gluon's are, one program after the other."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, num_warps, maxnreg, **constants: self._launch((*grid, 1)[:2], arguments, constants)

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        global program, programs
        programs = grid
        given = [_argument(x) for x in arguments]
        constants = {name: _argument(x) for name, x in constants.items()}
        for second in range(grid[1]):
            for first in range(grid[0]):
                program = (first, second)
                self._function(*given, **constants)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return Pointer(x.as_strided((max(0, elements),), (1,)))
    if hasattr(x, "block_shape"):
        x.dtype = x.base.dtype
    return getattr(torch, x.name) if isinstance(x, triton.language.dtype) else x


def kernels_on_cpu(module: ModuleType, *launched: str) -> dict[str, Any]:
    """The functions of a module that run on the CPU in place of its Gluon functions; `launched` are kernels."""
    functions = {name: getattr(x, "_kernel", x) for name, x in vars(module).items()}
    replaced = vars(module) | {
        "range": lambda *limits: map(torch.tensor, range(*(int(x) for x in limits))),
        "gl": LANGUAGE, "mbarrier": BARRIERS, "tma": COPIES,
        "libdevice": SimpleNamespace(fast_log2f=torch.log2),
        "fence_async_shared": lambda: None, "warpgroup_mma": multiply, "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": lambda pending, deps: deps if len(deps) > 1 else deps[0],
    }  # fmt: skip
    for name, function in functions.items():
        if isinstance(function, GluonJITFunction):
            replaced[name] = FunctionType(function.fn.__code__, replaced, name)
    return {name: CpuKernel(replaced[name]) for name in launched}


def takes_half(*tensors: Tensor, dims: tuple[int, ...] = (64,)) -> bool:
    """In place of `specializes_warps`: float16 takes the kernels, and float32 Triton's."""
    return tensors[0].dtype == torch.float16 and tensors[0].shape[-1] in dims
