"""Fixed tile sizes of the kernels, one small table: no autotuning at first use.

`rows` are query rows (token × head of the group), `keys` key positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

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
LARGE_DIM = Tile(64, 32, 8, 1)  # head dim 256
FLOAT32 = Tile(32, 32, 4, 1)  # products on the ordinary cores: checks and small runs, not speed


def tile_for(kernel: str, q: torch.Tensor, copied: bool = False) -> Tile:
    """The tile of a kernel for queries like these; `copied` if the tiles it walks are (`copies_tiles`)."""
    dim = padded(q.shape[-1])
    if q.dtype == torch.float32:
        return FLOAT32
    if dim > 128:
        return LARGE_DIM
    table = COPIED if copied else (AMPERE if is_ampere(q) else HALF)
    return table[kernel, max(64, dim)]


def copies_tiles(heads_per_group: int, *tensors: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator copies tiles of these: on Hopper, at head dim 128 in half precision.

    Tiles of queries must be whole tokens: else addresses of rows take the registers that copies free. At head dim 64 it
    gained little, and the host has to describe the tensors anew for every launch.
    """
    return LEAST_ROWS % heads_per_group == 0 and all(
        x.shape[-1] == 128 and x.element_size() == 2 and not is_ampere(x) and x.numel() > 0
        and all(stride * 2 % 16 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
        for x in tensors
    )  # fmt: skip


def padded(dim: int) -> int:
    """The head dim as a kernel holds it: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))


def precision(dtype: torch.dtype) -> str:
    """float32 products must be float32, not tf32; half precision has one way to multiply."""
    return "ieee" if dtype == torch.float32 else "tf32"


def unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """Kernels take unit stride in the last dimension, and heads that lie within 32-bit reach; others are copied.

    Positions are counted in 64 bits, heads in 32: head-major tensors of millions of tokens would pass 2^31.
    """
    in_reach = x.dim() < 3 or x.stride(2) * x.shape[2] < FARTHEST_HEAD
    return x if x.stride(-1) == 1 and in_reach else x.contiguous()


def is_ampere(x: torch.Tensor) -> bool:
    """Whether the tensor is on a GPU older than Hopper."""
    return x.is_cuda and _capability(x.device) < (9, 0)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
