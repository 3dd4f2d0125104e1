"""What the two forms of the selected branch share: fixed launch settings, key tiles, and rows of a head's elements."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import is_ampere
from tamis.attention.spec import NSASpec

MOST_KEYS = 64  # keys held at once; longer blocks are walked in several parts


def key_tiles(spec: NSASpec) -> tuple[int, int]:
    """Keys held at once (a power of two), and how many such tiles a selection block takes."""
    keys = min(MOST_KEYS, max(16, triton.next_power_of_2(spec.l_sel)))
    return keys, -(-spec.l_sel // keys)


@dataclass(frozen=True)
class Launch:
    rows: int  # of a tile: tokens × heads of the group
    warps: int
    stages: int
    registers: int | None = None  # most a thread may take, so that more programs share a multiprocessor


# kernel → head dim up to 64, up to 128; "copied" is the union whose keys the tensor memory accelerator copies. Measured
# on an H200. At dim 128 the copied union and the halves spill (24 and 16 bytes), and are faster for all that.
HOPPER = {
    "union": (Launch(128, 8, 3, registers=128), Launch(128, 8, 3)),
    "copied": (Launch(128, 8, 3), Launch(256, 8, 3)),
    "forward": (Launch(128, 4, 3, registers=168), Launch(64, 4, 2)),
    "backward": (Launch(64, 4, 3), Launch(64, 8, 3)),
    "halves": (Launch(64, 4, 2), Launch(64, 4, 2)),
}
# For A100, chosen from compiled code alone: the largest tiles that do not spill there.
AMPERE = {
    "union": (Launch(128, 8, 3), Launch(128, 8, 3)),
    "forward": (Launch(64, 4, 3), Launch(64, 4, 3)),
    "backward": (Launch(32, 4, 3), Launch(32, 8, 2)),
}
# Correct rather than fast: float32 multiplies on the ordinary cores, and head dims above 128 fill the registers.
SLOW = {
    "union": (Launch(32, 4, 1), Launch(32, 4, 1)),
    "copied": (Launch(32, 4, 1), Launch(32, 4, 1)),
    "forward": (Launch(32, 8, 1), Launch(32, 8, 1)),
    "backward": (Launch(32, 8, 1), Launch(16, 8, 1)),
    "halves": (Launch(32, 8, 1), Launch(16, 8, 1)),
}


def launch_settings(kernel: str, q_BSHD: Tensor, heads_per_group: int) -> dict[str, int]:
    """Keyword arguments of a launch: rows of a tile (at least one token's heads), warps, stages, registers."""
    dim = q_BSHD.shape[-1]
    table = AMPERE if is_ampere(q_BSHD) else HOPPER
    launch = (SLOW if q_BSHD.dtype == torch.float32 or dim > 128 else table)[kernel][dim > 64]
    rows = max(launch.rows, triton.next_power_of_2(heads_per_group))
    settings = {"ROWS": rows, "num_warps": launch.warps, "num_stages": launch.stages}
    return settings | ({"maxnreg": launch.registers} if launch.registers else {})


def takes_halves(q_BSHD: Tensor, heads_per_group: int) -> bool:
    """Whether the backward sweep holds a head's elements in two halves: where that was measured to be faster.

    Groups whose heads do not fill a tile of rows need more registers, and keep to the other kernel.
    """
    half_precision, fills_tiles = q_BSHD.dtype != torch.float32, 64 % heads_per_group == 0
    return q_BSHD.shape[-1] == 128 and half_precision and fills_tiles and not is_ampere(q_BSHD)


@triton.jit
def load_rows(base, offset, live, D: tl.constexpr, BD: tl.constexpr, ONCE: tl.constexpr = False):
    """Rows of D elements at `offset`; zeros where not live, and in the padding of D. Read ONCE they leave L2 first."""
    column = tl.arange(0, BD)
    mask = live[:, None] if D == BD else live[:, None] & (column < D)[None, :]
    policy: tl.constexpr = "evict_first" if ONCE else ""
    return tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0, eviction_policy=policy)


@triton.jit
def store_rows(base, offset, value, live, D: tl.constexpr, BD: tl.constexpr, ONCE: tl.constexpr = False):
    """Those to be read ONCE, and much later, leave L2 first."""
    column = tl.arange(0, BD)
    mask = live[:, None] if D == BD else live[:, None] & (column < D)[None, :]
    modifier: tl.constexpr = ".cs" if ONCE else ""
    target = base + offset[:, None] + column[None, :]
    tl.store(target, value.to(base.dtype.element_ty), mask=mask, cache_modifier=modifier)
