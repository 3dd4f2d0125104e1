"""Triton: cross-entropy of rows of logits, and its gradient written over them, in one visit.

A row is read twice, the second time from cache: once for its log-sum-exp, once to turn it into softmax minus target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, targets, losses, row_stride, vocab, padded, BLOCK: tl.constexpr, WRITE_GRADIENT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows × vocabulary passes 2^31
    base = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        x = tl.load(base + start + columns, mask=start + columns < vocab, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
        largest = new_largest
    log_sum = largest + tl.log(total)
    target = tl.load(targets + row)
    tl.store(losses + row, log_sum - tl.load(base + target).to(tl.float32))
    if WRITE_GRADIENT:
        tl.debug_barrier()  # the target's logit is read before another warp overwrites it
        for start in range(0, padded, BLOCK):
            column = start + columns
            x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=column < padded)


def cross_entropy_rows_(logits_TV: Tensor, targets_T: Tensor, vocab_size: int, write_gradient: bool) -> Tensor:
    """Loss of each row in float32; columns from `vocab_size` on are padding. With `write_gradient`, in place."""
    rows, padded = logits_TV.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
    _cross_entropy_kernel[(rows,)](
        logits_TV,
        targets_T,
        losses,
        logits_TV.stride(0),
        vocab_size,
        padded,
        BLOCK=BLOCK,
        WRITE_GRADIENT=write_gradient,
        num_warps=WARPS,
    )
    return losses
