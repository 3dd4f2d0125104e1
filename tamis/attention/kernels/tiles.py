"""Tile sizes of the kernels: tables that serve every GPU without a measurement, and the candidates `tamis tune` times.

`rows` are query rows (token × head of the group), `keys` key positions. Kernels: the dense branches have `forward`,
`dq` and `dkv`, the selection `score`, the selected branch `union` and `pairs` forward, `backward` or `halves` backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Family = Literal["ampere", "ada", "hopper"]
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # capabilities with 99 KiB of shared memory for a program


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


@dataclass(frozen=True)
class RowTile:
    """A tile of the selected branch, whose keys are those of a selection block."""

    rows: int
    warps: int
    stages: int
    registers: int | None = None


AnyTile = Tile | RowTile

# (kernel, padded head dim) → tile; half precision.
HOPPER = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 3),
    ("dq", 64): Tile(64, 64, 4, 3, registers=168),
    ("dq", 128): Tile(128, 64, 8, 2),
    ("dkv", 64): Tile(64, 64, 4, 3),
    ("dkv", 128): Tile(64, 64, 4, 2),
    ("score", 64): Tile(64, 64, 4, 2),
    ("score", 128): Tile(64, 64, 4, 2),
    # Where the tensor memory accelerator copies the tiles that are walked.
    ("forward_copied", 128): Tile(128, 64, 4, 2),
    ("dq_copied", 128): Tile(64, 64, 4, 2),
    ("dkv_copied", 128): Tile(64, 64, 4, 2),
}
# What differs on an A100, chosen from compiled code alone: the entries above would spill 16 to 1,272 bytes there, of
# these only dkv at head dim 128 spills, 8 bytes.
AMPERE = HOPPER | {
    ("forward", 64): Tile(128, 64, 8, 3),
    ("dq", 64): Tile(64, 64, 4, 3),
    ("dq", 128): Tile(64, 64, 8, 2),
    ("dkv", 128): Tile(64, 64, 8, 2),
    ("score", 64): Tile(64, 32, 4, 2),
    ("score", 128): Tile(128, 64, 8, 2),
}
# L40S, RTX 4090 and other GPUs with little shared memory: as A100, where it fits.
ADA = AMPERE | {("forward", 128): Tile(128, 64, 8, 2)}
LARGE_DIM = Tile(64, 32, 8, 1)  # head dims above 128; they do not fit the shared memory of the GPUs above
# On Hopper, ptxas 12.8 miscompiles the unpipelined dkv kernel with 64 rows and at most 32 keys: dk is wrong, or an
# address is illegal. The same PTX is right at optimization level 0 and with ptxas 13.0, and no sanitizer finds a
# race. With these tiles the scores are multiplied by `mma`, almost nothing spills, and the results are right.
LARGE_DIM_DKV = Tile(32, 64, 8, 1)
FLOAT32 = Tile(32, 32, 4, 1)  # products on the ordinary cores: checks and small runs, not speed
BANDED = {"ampere": AMPERE, "ada": ADA, "hopper": HOPPER}

# Kernel → head dim up to 64, up to 128; "union_copied" is the union whose keys the tensor memory accelerator copies.
# Measured on an H200. At dim 128 the copied union and the halves spill (8 and 16 bytes), and are faster for all that.
SELECTED_HOPPER = {
    "union": (RowTile(128, 8, 3, registers=128), RowTile(128, 8, 3)),
    "union_copied": (RowTile(128, 8, 3), RowTile(128, 4, 2)),
    "pairs": (RowTile(128, 4, 3, registers=168), RowTile(64, 4, 2)),
    "backward": (RowTile(64, 4, 3), RowTile(64, 8, 3)),
    "halves": (RowTile(64, 4, 2), RowTile(64, 4, 2)),
}
# For A100, chosen from compiled code alone: the largest tiles that do not spill there.
SELECTED_AMPERE = {
    "union": (RowTile(128, 8, 3), RowTile(128, 8, 3)),
    "pairs": (RowTile(64, 4, 3), RowTile(64, 4, 3)),
    "backward": (RowTile(32, 4, 3), RowTile(32, 8, 2)),
}
SELECTED_ADA = SELECTED_AMPERE | {"union": (RowTile(128, 8, 3), RowTile(128, 8, 2))}
# Correct rather than fast: float32 multiplies on the ordinary cores, and head dims above 128 fill the registers.
SELECTED_SLOW = {
    "union": (RowTile(32, 4, 1), RowTile(32, 4, 1)),
    "union_copied": (RowTile(32, 4, 1), RowTile(32, 4, 1)),
    "pairs": (RowTile(32, 8, 1), RowTile(32, 8, 1)),
    "backward": (RowTile(32, 8, 1), RowTile(16, 8, 1)),
    "halves": (RowTile(32, 8, 1), RowTile(16, 8, 1)),
}
SELECTED = {"ampere": SELECTED_AMPERE, "ada": SELECTED_ADA, "hopper": SELECTED_HOPPER}


def family_of(capability: tuple[int, int]) -> Family:
    """Which tables serve a compute capability."""
    if capability in SMALL_MEMORY:
        return "ada"
    return "ampere" if capability < (9, 0) else "hopper"


def shipped_tile(kernel: str, family: Family, dtype: torch.dtype, dim: int) -> AnyTile:
    """The tile of the tables for a head dim, a power of two."""
    if kernel in SELECTED_SLOW:
        table = SELECTED_SLOW if dtype == torch.float32 or dim > 128 else SELECTED[family]
        return table[kernel][dim > 64]
    if dtype == torch.float32:
        return FLOAT32
    if dim > 128:
        return LARGE_DIM_DKV if kernel == "dkv" and family == "hopper" else LARGE_DIM
    return BANDED[family][kernel, max(64, dim)]


# Kernel → (rows, keys, warps) or (rows, warps) that `tamis tune` times, each with several stages. None has 128 keys at
# head dim 128, where a GPU faulted; dkv's keys divide 64, because tables of packed rows list tiles of 64.
SHAPES = {
    "forward": ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 32, 4), (128, 128, 8), (64, 128, 4)),
    "dq": ((64, 64, 4), (64, 32, 4), (64, 64, 8), (128, 64, 8), (128, 32, 8)),
    "dkv": ((32, 64, 4), (64, 64, 4), (64, 64, 8), (128, 64, 8), (64, 32, 4)),
    "score": ((64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 64, 8)),
    "forward_copied": ((64, 64, 4), (128, 64, 4), (128, 64, 8)),
    "dq_copied": ((64, 64, 4), (64, 64, 8), (128, 64, 8)),
    "dkv_copied": ((64, 64, 4), (64, 64, 8), (128, 64, 8)),
    "union": ((64, 4), (128, 4), (128, 8), (256, 8)),
    "union_copied": ((128, 4), (128, 8), (256, 8)),
    "pairs": ((32, 4), (64, 4), (128, 4), (128, 8)),
    "backward": ((32, 4), (64, 4), (64, 8), (128, 8)),
    "halves": ((32, 4), (64, 4), (64, 8)),
}
STAGES = (2, 3, 4)


def candidates(kernel: str, family: Family, dtype: torch.dtype, dim: int) -> list[AnyTile]:
    """The tiles worth timing, the shipped one first; it is the only one in float32 and above head dim 128."""
    shipped = shipped_tile(kernel, family, dtype, dim)
    if dtype == torch.float32 or dim > 128:
        return [shipped]
    shapes = [shape for shape in SHAPES[kernel] if dim <= 64 or len(shape) == 2 or shape[1] <= 64]
    form: Any = Tile if len(shapes[0]) == 3 else RowTile
    others = [form(*shape, stages) for shape in shapes for stages in STAGES]
    return [shipped, *(tile for tile in others if tile != shipped)]
