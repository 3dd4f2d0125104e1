"""How kernels are launched: tiles, streams, and arguments every kernel takes alike. Nothing is tuned at first use."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.checks import FARTHEST_HEAD
from tamis.attention.kernels.tape import current_recording
from tamis.attention.kernels.tiles import Tile
from tamis.attention.kernels.tuned import chosen_tile, gpu_model
from tamis.attention.spec import DeviceStart, NSASpec, Start

LOG2E = 1.4426950408889634

MOST_PREPARED = 256  # launches of a kernel
MOST_SIDE_TOKENS = 131072  # of a call with a side stream: longer ones gain little, and use memory of two pools
MULTIPROCESSORS = 132  # of an H100, where there is no GPU to ask
MEASURED_WITH = "3.6."  # the Triton whose code was timed and proved on a GPU
GLUON_PROVED_WITH = LAUNCHER_PROVED_WITH = (MEASURED_WITH,)
NUMBERS: frozenset[type] = frozenset((int, float, bool, type(None)))
# Arguments that a launcher takes as they are; the others are tensors (`isinstance(x, Tensor)` is slow). A module whose
# prepared kernels take descriptors adds their type.
PASSED_ON: set[type] = set(NUMBERS)


MANY_TOKENS = 32768  # of a call: its kernels fill the GPU one after the other
SHORT_IN_BOXES = 8192  # tokens of a sequence; longer ones of head dim 64 have kernels that are faster there; measured
MOST_KEYS = 64  # of a selection block held at once; longer blocks are walked in several parts
LEAST_ROWS = 64  # of a tile where the tensor memory accelerator copies what is walked


def tile_for(kernel: str, q: Tensor, heads_per_group: int = 1, copied: bool = False) -> Tile:
    """The tile of a kernel for queries like these; `copied` if the tiles it walks are (`copies_tiles`)."""
    name = f"{kernel}_copied" if copied else kernel
    return chosen_tile(name, q.device, q.dtype, padded(q.shape[-1]), heads_per_group)  # type: ignore[return-value]


def copies_tiles(heads_per_group: int, *tensors: Tensor) -> bool:
    """Whether the tensor memory accelerator copies tiles of these: on Hopper, at head dim 128 in half precision.

    Tiles of queries must be whole tokens: else addresses of rows take the registers that copies free. At head dim 64 it
    gained little, and the host has to describe the tensors at every launch.
    """
    return LEAST_ROWS % heads_per_group == 0 and all(
        x.shape[-1] == 128 and x.element_size() == 2 and not is_ampere(x) and x.numel() > 0
        and all(stride * 2 % 16 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
        for x in tensors
    )  # fmt: skip


def specializes_warps(*tensors: Tensor, dims: tuple[int, ...] = (64,)) -> bool:
    """Whether kernels in Gluon for these head dims take these `[B,tokens,heads,D]`, in half precision on Hopper.

    Their copies need the heads of a token next to each other, and Gluon is experimental: other versions may lack it.
    """
    gpu = gpu_model(tensors[0].device)
    known = gpu is not None and gpu.capability[0] == 9 and triton.__version__.startswith(GLUON_PROVED_WITH)
    return known and all(x.shape[-1] in dims and _has_boxes_of_heads(x) for x in tensors)


def fills_the_gpu(q: Tensor) -> bool:
    """Whether a call has so many tokens that single kernels keep all multiprocessors busy."""
    return q.shape[0] * q.shape[1] >= MANY_TOKENS


def takes_boxes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `hopper/boxes.py` has the kernel for queries from position 0 on, and it is the fastest."""
    short = fills_the_gpu(q) and q.shape[1] <= SHORT_IN_BOXES
    return specializes_warps(q, k, v, dims=(64, 128) if short else (128,))


def _has_boxes_of_heads(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can copy tokens of some heads, up to the sequence's end."""
    (batch, tokens, heads, dim), (of_batch, of_token, of_head, last) = x.shape, x.stride()
    in_order = heads * dim <= of_token and (batch == 1 or (of_batch >= tokens * of_token and of_batch % of_token == 0))
    adjacent = last == 1 and (heads == 1 or of_head == dim) and in_order
    aligned = of_token % 8 == 0 and x.data_ptr() % 16 == 0
    return x.element_size() == 2 and x.numel() > 0 and adjacent and aligned


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(dividend: int, divisor: int) -> int:
    """Round the quotient up. Triton's function of this name takes the host several microseconds."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below; as fast as `cdiv`."""
    return 1 << max(0, number - 1).bit_length()


def padded(dim: int) -> int:
    """The head dim as a kernel holds it: a power of two of at least 16."""
    return max(16, next_power_of_2(dim))


def softmax_scale(x: Tensor, scale: float | None) -> float:
    """The scale of the scores, by default `D ** -0.5`."""
    return x.shape[-1] ** -0.5 if scale is None else float(scale)  # 2 and 2.0 are one key of a prepared launch


def precision(dtype: torch.dtype) -> str:
    """float32 products must be float32, not tf32; half precision has one way to multiply."""
    return "ieee" if dtype == torch.float32 else "tf32"


def unit_last_stride(x: Tensor) -> Tensor:
    """Kernels take unit stride in the last dimension, and heads that lie within 32-bit reach; others are copied.

    Positions are counted in 64 bits, heads in 32: head-major tensors of millions of tokens would pass 2^31.
    """
    if x.is_contiguous():
        return x
    in_reach = x.dim() < 3 or x.stride(2) * x.shape[2] < FARTHEST_HEAD
    return x if x.stride(-1) == 1 and in_reach else x.contiguous()


def is_ampere(x: Tensor) -> bool:
    """Whether the tensor is on a GPU older than Hopper, or on one with as little shared memory as some of those."""
    gpu = gpu_model(x.device)
    return gpu is not None and gpu.family != "hopper"


def launch_settings(kernel: str, q_BSHD: Tensor, heads_per_group: int) -> dict[str, int]:
    """Keyword arguments of a launch: rows of a tile (at least one token's heads), warps, stages, registers."""
    launch = chosen_tile(kernel, q_BSHD.device, q_BSHD.dtype, padded(q_BSHD.shape[-1]), heads_per_group)
    rows = max(launch.rows, next_power_of_2(heads_per_group))
    settings = {"ROWS": rows, "num_warps": launch.warps, "num_stages": launch.stages}
    return settings | ({"maxnreg": launch.registers} if launch.registers else {})


def takes_halves(q_BSHD: Tensor, heads_per_group: int) -> bool:
    """Whether the backward sweep holds a head's elements in two halves: where that was measured to be faster.

    Groups whose heads do not fill a tile of rows need more registers, and keep to the other kernel.
    """
    half_precision, fills_tiles = q_BSHD.dtype != torch.float32, 64 % heads_per_group == 0
    return q_BSHD.shape[-1] == 128 and half_precision and fills_tiles and not is_ampere(q_BSHD)


def block_tiles(spec: NSASpec) -> tuple[int, int]:
    """Keys held at once (a power of two), and how many such tiles a selection block takes."""
    keys = min(MOST_KEYS, max(16, next_power_of_2(spec.l_sel)))
    return keys, -(-spec.l_sel // keys)


class PreparedLaunch:
    """A kernel with its grid and every argument but the first few.

    Triton looks at all arguments of a launch to find the compiled kernel, which takes most of the host's time. This
    looks once, for one device. Later calls have the same numbers, tensors of the same dtypes, and addresses that are
    multiples of 16 where the first call's are. The constants are the last parameters of the kernel.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._compiled: Any = None
        self._run: Any = None
        self._before: tuple[Any, ...] = ()  # the first argument
        self._rest: tuple[Any, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether `at` launches; never in the interpreter."""
        return self._compiled is not None

    def __call__(self, *first: Any) -> None:
        compiled, hooks = self._compiled, triton.knobs.runtime
        if compiled is None:
            self._prepare(first)
        elif hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # of a profiler
            compiled[self._grid](*first, *self._rest)
        else:
            driver = triton.runtime.driver.active
            stream = driver.get_current_stream(driver.get_current_device())
            # Addresses, because the launcher would ask the CUDA driver about every tensor.
            self.at(stream, [x if type(x) in PASSED_ON else x.data_ptr() for x in first])

    def at(self, stream: int, first: Sequence[Any]) -> None:
        """Launch on a stream with addresses instead of tensors."""
        self._run(*self._grid, stream, *self._before, *first, *self._rest)

    def _prepare(self, first: tuple[Any, ...]) -> None:
        compiled = self._kernel[self._grid](*first, *self._numbers, **self._constants)
        if compiled is not None:  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(first) + len(self._numbers) :]
            self._rest = (*self._numbers, *(self._constants[name] for name in names))
            self._grid = (*self._grid, 1, 1)[:3]
            self._run, self._before = _launcher_of(compiled)
            self._compiled = compiled  # last: another thread may launch from here on


def _launcher_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function that launches a compiled kernel, and what it takes between the stream and the first argument.

    Triton's launcher asks at every launch how much memory a kernel needs for itself. If that is none, the function that
    it calls does the same in less time.
    """
    run, hooks = compiled.run, (None, None, None)
    known = triton.__version__.startswith(LAUNCHER_PROVED_WITH) and hasattr(run, "launch")
    if known and not run.global_scratch_size and not run.profile_scratch_size:
        how = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (compiled.function, *how, compiled.packed_metadata, *hooks)
    return run, (compiled.function, compiled.packed_metadata, *hooks)


class PreparedKernel:
    """A kernel that is launched as Triton's are, and whose launches are prepared when they occur first.

    The first argument is a tensor; later ones may be descriptors, of which every launch makes a map for the copies. A
    launch with COPIED tiles is left to Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launches: dict[tuple[Any, ...], PreparedLaunch] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if constants.get("COPIED"):
            launch_by_triton(self._kernel, grid, *arguments, **constants)
            return
        kinds = [
            x if type(x) in NUMBERS else _box(x) if type(x) in PASSED_ON else (x.dtype, x.data_ptr() % 16 == 0)
            for x in arguments
        ]
        key = (grid, arguments[0].device, *kinds, *constants, *constants.values())
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= MOST_PREPARED:
                self._launches.clear()
            launch = self._launches[key] = PreparedLaunch(self._kernel, grid, (), constants)
        if recording := current_recording():
            recording.launch(launch, arguments)
        else:
            launch(*arguments)


def launch_by_triton(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel that takes descriptors, and is not prepared. On a tape this is the one way to do it."""
    launch = partial(kernel[grid], **constants)
    if recording := current_recording():
        recording.launch_by_triton(launch, arguments)
    else:
        launch(*arguments)


def _box(descriptor: Any) -> tuple[Any, ...]:
    """What a kernel is compiled for; a launch passes on where the tensor lies."""
    return descriptor.base.dtype, *descriptor.block_shape


class SideStream:
    """A stream of high priority: what a `with` block launches runs next to what the current stream was given since.

    The selected branch goes there, and dq of all branches. Between its products the branch joins partial results, which
    is bound by memory, and makes lists, which leaves most of the GPU idle: the other branches' products fill it.

    What the block uses of the current stream's memory must be allocated before this object is made, because memory that
    is freed later may still be in use, and must live until the block ends, where the current stream waits. What the
    block allocates may be freed any time later: each current stream has a side stream of its own, whose next use waits.
    """

    def __init__(self, q_BSHD: Tensor) -> None:
        self._streams = None
        if q_BSHD.is_cuda and q_BSHD.shape[0] * q_BSHD.shape[1] <= MOST_SIDE_TOKENS:
            device = q_BSHD.get_device()
            if device == torch.cuda.current_device():  # launches go to the current device
                self._streams = _streams_of(device, torch._C._cuda_getCurrentRawStream(device))
                self._streams.begin.record(self._streams.current)
        if recording := current_recording():
            recording.begin_side(SideStream, q_BSHD)

    def __enter__(self) -> None:
        if recording := current_recording():
            recording.enter_side()
        if self._streams is not None:
            self._streams.begin.wait(self._streams.side)
            torch.cuda.set_stream(self._streams.side)

    def wait(self) -> None:
        """In the block: what it launches from now on waits for what the current stream was given so far.

        It may then use memory that was allocated after this object was made.
        """
        if recording := current_recording():
            recording.wait_on_side()
        if self._streams is not None:
            self._streams.begin.record(self._streams.current)
            self._streams.begin.wait(self._streams.side)

    def __exit__(self, *exception: object) -> None:
        if recording := current_recording():
            recording.leave_side()
        if self._streams is not None:
            torch.cuda.set_stream(self._streams.current)
            self._streams.end.record(self._streams.side)
            self._streams.end.wait(self._streams.current)


class _Streams(NamedTuple):
    """A stream with its side stream, and two events, each always recorded on the same stream.

    Several threads may use them at once: one that finds an event recorded again waits longer, never too short.
    """

    current: torch.cuda.Stream
    side: torch.cuda.Stream
    begin: torch.cuda.Event
    end: torch.cuda.Event


@cache
def _streams_of(device: int, raw_stream: int) -> _Streams:
    """Of the current stream, which the number is the address of."""
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)
    return _Streams(current, side, torch.cuda.Event(), torch.cuda.Event())


def start_argument(start: Start) -> int | Tensor | None:
    """The argument of a kernel; None for 0, which compiles the kernel without a position."""
    return start.where if isinstance(start, DeviceStart) else start or None


@triton.jit
def read_start(start):
    """Return the position, from a number or from a pointer to one."""
    if start.dtype.is_ptr():
        start = tl.load(start).to(tl.int32)
    return start
