"""Triton: cross-entropy of rows of logits, and its gradient written over them, in one visit.

A row is read twice, the second time from cache: once for its log-sum-exp, once to turn it into softmax minus target. So
that it is still there, few rows are under way at once, and many warps share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_WARPS = 32  # two programs fill a multiprocessor: 27 MB of logits under way on an H200, half its cache
WIDEST_LOAD = 16  # bytes


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    row_stride,
    vocab,
    padded,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
):
    TILE: tl.constexpr = LANES * VECTOR
    columns = (tl.arange(0, LANES) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows × vocabulary passes 2^31
    base = logits + row * row_stride
    target = tl.load(targets + row).to(tl.int32)
    of_target = tl.load(base + target).to(tl.float32)
    # Whole tiles go without a mask: one that ends at any column makes of a load of 16 bytes eight of two.
    whole = vocab // TILE * TILE
    largest = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)  # both of each lane: the lanes meet at the end of the row alone
    for start in range(0, whole, TILE):
        x = tl.load(base + start + columns).to(tl.float32)
        largest, total = _add_tile(x, largest, total)
    if whole < vocab:
        x = _load_last(base, whole + columns, vocab, padded)
        largest, total = _add_tile(x, largest, total)
    largest_of_all = tl.max(largest, 0)
    log_sum = largest_of_all + tl.log(tl.sum(total * _exp(largest - largest_of_all), 0))
    tl.store(losses + row, log_sum - of_target)
    if WRITE_GRADIENT:
        tl.debug_barrier()  # the target's logit is read before another warp overwrites it
        for start in range(0, whole, TILE):
            column = start + columns
            x = tl.load(base + column).to(tl.float32)
            gradient = _exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(base + column, gradient.to(logits.dtype.element_ty))
        for start in range(whole, padded, TILE):
            column = start + columns
            x = _load_last(base, column, vocab, padded)
            gradient = _exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=column < padded)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """`tl.exp` takes three instructions more, to keep results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _add_tile(x, largest, total):  # type: ignore[no-untyped-def]
    """Of each lane the largest value so far, and the sum of the exponentials that are relative to it."""
    new_largest = tl.maximum(largest, tl.max(x, 1))
    reached = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # a lane beyond a short row has seen nothing
    return new_largest, total * _exp(largest - reached) + tl.sum(_exp(x - reached[:, None]), 1)


@triton.jit
def _load_last(base, column, vocab, padded):  # type: ignore[no-untyped-def]
    """The row's end; what it holds of the padding counts as minus infinity."""
    x = tl.load(base + column, mask=column < padded, other=0.0).to(tl.float32)
    return tl.where(column < vocab, x, -float("inf"))


def cross_entropy_rows_(logits_TV: Tensor, targets_T: Tensor, vocab_size: int, write_gradient: bool) -> Tensor:
    """Loss of each row in float32; columns from `vocab_size` on are padding. With `write_gradient`, in place."""
    rows, padded = logits_TV.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
    vector = WIDEST_LOAD // logits_TV.element_size()
    warps = min(MOST_WARPS, triton.next_power_of_2(triton.cdiv(padded, 32 * vector)))
    _cross_entropy_kernel[(rows,)](
        logits_TV,
        targets_T,
        losses,
        logits_TV.stride(0),
        vocab_size,
        padded,
        LANES=32 * warps,
        VECTOR=vector,
        WRITE_GRADIENT=write_gradient,
        num_warps=warps,
    )
    return losses
