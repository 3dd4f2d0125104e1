"""Where the first query of a tile stands: a number, or a place on the device that holds it.

A captured CUDA graph launches its kernels with the same numbers at every replay, and so can read tiles of a prompt one
after the other only if they find the position themselves.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


class DeviceStart(int):
    """To the host the latest position there may be, by which it sizes what it allocates; kernels read `where`."""

    where: Tensor

    def __new__(cls, latest: int, where: Tensor) -> DeviceStart:
        start = super().__new__(cls, latest)
        start.where = where
        return start


def start_argument(start: int) -> int | Tensor | None:
    """What a kernel gets; None for 0: it is compiled without a position."""
    return start.where if isinstance(start, DeviceStart) else start or None


@triton.jit
def read_start(start):
    """The position, whichever way a kernel got it."""
    if start.dtype.is_ptr():
        start = tl.load(start).to(tl.int32)
    return start
