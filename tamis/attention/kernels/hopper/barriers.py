"""Gluon: the barriers of a ring of tiles in shared memory, which one warp copies and groups of warps read."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers_of_ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Two for each slot: one is passed when a copy has filled the slot, the other when all readers are done with it."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty
