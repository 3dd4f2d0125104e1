"""What the two forms of the selected branch share: rows of a head's elements, key tiles and launch settings."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tamis.attention.spec import NSASpec

LOG2E = 1.4426950408889634
MOST_KEYS = 128  # keys held at once; longer blocks are walked in several parts


def key_tiles(spec: NSASpec) -> tuple[int, int]:
    """Keys held at once (a power of two), and how many such tiles a selection block takes."""
    keys = min(MOST_KEYS, max(16, triton.next_power_of_2(spec.l_sel)))
    return keys, -(-spec.l_sel // keys)


def config(rows: int, warps: int, stages: int, registers: int | None = None) -> dict[str, int]:
    """Launch settings; `registers` caps what a thread may take, so that more programs share a multiprocessor."""
    cap = {"maxnreg": registers} if registers else {}
    return {"ROWS": rows, "num_warps": warps, "num_stages": stages, **cap}


@triton.jit
def load_rows(base, offset, live, D: tl.constexpr, BD: tl.constexpr):
    """Rows of D elements at `offset`; zeros where not live, and in the padding of D."""
    column = tl.arange(0, BD)
    mask = live[:, None] if D == BD else live[:, None] & (column < D)[None, :]
    return tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, offset, value, live, D: tl.constexpr, BD: tl.constexpr):
    column = tl.arange(0, BD)
    mask = live[:, None] if D == BD else live[:, None] & (column < D)[None, :]
    tl.store(base + offset[:, None] + column[None, :], value.to(base.dtype.element_ty), mask=mask)
