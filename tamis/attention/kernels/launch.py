"""How kernels are launched: fixed tile sizes (no autotuning at first use), and arguments every kernel takes alike.

`rows` are query rows (token × head of the group), `keys` key positions.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.functional import capability
from tamis.attention.spec import DeviceStart, NSASpec, Start

LOG2E = 1.4426950408889634

FARTHEST_HEAD = 1 << 31  # elements


@dataclass(frozen=True)
class Tile:
    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # per thread, where fewer let one more program share the multiprocessor

    @property
    def options(self) -> dict[str, int]:
        """What the launch of a kernel takes."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


# (kernel, padded head dim) → tile; half precision. The smaller of two shared memories (A100, 164 KB) fits every entry.
HALF = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 3),
    ("dq", 64): Tile(64, 64, 4, 3, registers=168),
    ("dq", 128): Tile(128, 64, 8, 2),
    ("dkv", 64): Tile(64, 64, 4, 3),
    ("dkv", 128): Tile(64, 64, 4, 2),
    ("score", 64): Tile(64, 64, 4, 3),
    ("score", 128): Tile(64, 64, 4, 2),
}
# Where the tensor memory accelerator copies the tiles that are walked.
LEAST_ROWS = 64
COPIED = {
    ("forward", 128): Tile(128, 64, 4, 2),
    ("dq", 128): Tile(64, 64, 4, 2),
    ("dkv", 128): Tile(64, 64, 4, 2),
}
# What differs on an A100, chosen from compiled code alone: the entries above would spill 16 to 1,272 bytes there, of
# these only dkv at head dim 128 spills, 8 bytes.
AMPERE = HALF | {
    ("forward", 64): Tile(128, 64, 8, 3),
    ("dq", 64): Tile(64, 64, 4, 3),
    ("dq", 128): Tile(64, 64, 8, 2),
    ("dkv", 128): Tile(64, 64, 8, 2),
    ("score", 64): Tile(64, 32, 4, 2),
    ("score", 128): Tile(128, 64, 8, 2),
}
LARGE_DIM = Tile(64, 32, 8, 1)  # head dims above 128
# On Hopper, ptxas 12.8 miscompiles the unpipelined dkv kernel with 64 rows and at most 32 keys: dk is wrong, or an
# address is illegal. The same PTX is right at optimization level 0 and with ptxas 13.0, and no sanitizer finds a
# race. With these tiles the scores are multiplied by `mma`, almost nothing spills, and the results are right.
LARGE_DIM_DKV = Tile(32, 64, 8, 1)
FLOAT32 = Tile(32, 32, 4, 1)  # products on the ordinary cores: checks and small runs, not speed


MOST_KEYS = 64  # of a selection block held at once; longer blocks are walked in several parts


@dataclass(frozen=True)
class RowTile:
    """A tile of the selected branch, whose keys are those of a selection block."""

    rows: int
    warps: int
    stages: int
    registers: int | None = None


# kernel → head dim up to 64, up to 128; "copied" is the union whose keys the tensor memory accelerator copies. Measured
# on an H200. At dim 128 the copied union and the halves spill (24 and 16 bytes), and are faster for all that.
SELECTED_HOPPER = {
    "union": (RowTile(128, 8, 3, registers=128), RowTile(128, 8, 3)),
    "copied": (RowTile(128, 8, 3), RowTile(256, 8, 3)),
    "forward": (RowTile(128, 4, 3, registers=168), RowTile(64, 4, 2)),
    "backward": (RowTile(64, 4, 3), RowTile(64, 8, 3)),
    "halves": (RowTile(64, 4, 2), RowTile(64, 4, 2)),
}
# For A100, chosen from compiled code alone: the largest tiles that do not spill there.
SELECTED_AMPERE = {
    "union": (RowTile(128, 8, 3), RowTile(128, 8, 3)),
    "forward": (RowTile(64, 4, 3), RowTile(64, 4, 3)),
    "backward": (RowTile(32, 4, 3), RowTile(32, 8, 2)),
}
# Correct rather than fast: float32 multiplies on the ordinary cores, and head dims above 128 fill the registers.
SELECTED_SLOW = {
    "union": (RowTile(32, 4, 1), RowTile(32, 4, 1)),
    "copied": (RowTile(32, 4, 1), RowTile(32, 4, 1)),
    "forward": (RowTile(32, 8, 1), RowTile(32, 8, 1)),
    "backward": (RowTile(32, 8, 1), RowTile(16, 8, 1)),
    "halves": (RowTile(32, 8, 1), RowTile(16, 8, 1)),
}


def tile_for(kernel: str, q: Tensor, copied: bool = False) -> Tile:
    """The tile of a kernel for queries like these; `copied` if the tiles it walks are (`copies_tiles`)."""
    dim = padded(q.shape[-1])
    if q.dtype == torch.float32:
        return FLOAT32
    if dim > 128:
        return LARGE_DIM_DKV if kernel == "dkv" and not is_ampere(q) else LARGE_DIM
    table = COPIED if copied else (AMPERE if is_ampere(q) else HALF)
    return table[kernel, max(64, dim)]


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
    return x.shape[-1] ** -0.5 if scale is None else scale


def precision(dtype: torch.dtype) -> str:
    """float32 products must be float32, not tf32; half precision has one way to multiply."""
    return "ieee" if dtype == torch.float32 else "tf32"


def unit_last_stride(x: Tensor) -> Tensor:
    """Kernels take unit stride in the last dimension, and heads that lie within 32-bit reach; others are copied.

    Positions are counted in 64 bits, heads in 32: head-major tensors of millions of tokens would pass 2^31.
    """
    in_reach = x.dim() < 3 or x.stride(2) * x.shape[2] < FARTHEST_HEAD
    return x if x.stride(-1) == 1 and in_reach else x.contiguous()


def is_ampere(x: Tensor) -> bool:
    """Whether the tensor is on a GPU older than Hopper."""
    return x.is_cuda and capability(x.device) < (9, 0)


def launch_settings(kernel: str, q_BSHD: Tensor, heads_per_group: int) -> dict[str, int]:
    """Keyword arguments of a launch: rows of a tile (at least one token's heads), warps, stages, registers."""
    dim = q_BSHD.shape[-1]
    table = SELECTED_AMPERE if is_ampere(q_BSHD) else SELECTED_HOPPER
    launch = (SELECTED_SLOW if q_BSHD.dtype == torch.float32 or dim > 128 else table)[kernel][dim > 64]
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
    """A kernel with its grid and every argument but the first, which are tensors.

    Triton looks at all arguments of a launch to find the compiled kernel, which takes most of the host's time. This
    looks once, for one device. Tensors of later calls have the same dtypes, and addresses that are multiples of 16
    where the first call's are. The constants are the last parameters of the kernel.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._numbers, self._constants, self._options = (
            kernel, grid, numbers, constants, options
        )  # fmt: skip
        self._compiled: Any = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        compiled, hooks = self._compiled, triton.knobs.runtime
        if compiled is None:
            self._prepare(tensors)
        elif hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # of a profiler
            compiled[self._grid](*tensors, *self._rest)
        else:
            driver = triton.runtime.driver.active
            stream = driver.get_current_stream(driver.get_current_device())
            # Addresses, because the launcher would ask the CUDA driver about every tensor.
            rest = (None, None, None, *[x.data_ptr() for x in tensors], *self._rest)
            compiled.run(*self._grid, stream, compiled.function, compiled.packed_metadata, *rest)

    def _prepare(self, tensors: tuple[Tensor, ...]) -> None:
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants, **self._options)
        if compiled is not None:  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(tensors) + len(self._numbers) :]
            self._rest = (*self._numbers, *(self._constants[name] for name in names))
            self._compiled = compiled


def start_argument(start: Start) -> int | Tensor | None:
    """The argument of a kernel; None for 0, which compiles the kernel without a position."""
    return start.where if isinstance(start, DeviceStart) else start or None


@triton.jit
def read_start(start):
    """Return the position, from a number or from a pointer to one."""
    if start.dtype.is_ptr():
        start = tl.load(start).to(tl.int32)
    return start
