"""Gluon: maxima and sums of 64 × 64 scores, which the kernels for Hopper compute between two products.

Triton reduces the elements of a thread one after the other, and each step waits for the one before. A first step over
every eighth element has four independent chains per thread.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def layout_of_sums() -> Any:
    """The layout of `[64, 8]` sums of every eighth element: each in a thread that holds those elements."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]], lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 8],
    )  # fmt: skip


@gluon.jit
def max_of_rows(s, ROW: gl.constexpr):
    return gl.convert_layout(gl.max(gl.max(s.reshape([64, 8, 8]), 1), 1), ROW)


@gluon.jit
def sum_of_rows(p, ROW: gl.constexpr):
    return gl.convert_layout(gl.sum(gl.sum(p.reshape([64, 8, 8]), 1), 1), ROW)


@gluon.jit
def add_to_sums(sums, decay, p):
    """Decay `[64, 8]` sums of every eighth element and add those of a further tile.

    `total_of_sums` adds up a row after the last tile, so that no thread waits for another in the loop.
    """
    SUMS: gl.constexpr = layout_of_sums()
    further = gl.convert_layout(gl.sum(p.reshape([64, 8, 8]), 1), SUMS)
    return sums * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None] + further


@gluon.jit
def total_of_sums(sums, ROW: gl.constexpr):
    return gl.convert_layout(gl.sum(sums, 1), ROW)
