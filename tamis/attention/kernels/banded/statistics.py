"""Triton: the rows' log-sum-exp, delta and gate, laid out as the kernels that walk rows read them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.launch import PreparedKernel, cdiv, next_power_of_2
from tamis.attention.kernels.tape import empty


def gather_statistics(lse_BHS: Tensor, delta_BHS: Tensor, gates_BSH: Tensor, gated: bool = True) -> Tensor:
    """Log-sum-exp (base 2), delta and gate, as float32 [3,B,S,H]: a token's heads are adjacent, as tiles read them.

    If not `gated`, delta comes without its gate, <dout, out>, and is 0 where the gate is 0.
    """
    batch, heads, tokens = lse_BHS.shape
    statistics = empty((3, batch, tokens, heads), torch.float32, lse_BHS.device)
    # A grid of one dimension: the second takes no more than 65,535 programs, and a batch may be larger.
    _transpose_statistics[(cdiv(tokens, 64) * batch,)](
        lse_BHS, delta_BHS, gates_BSH, statistics, tokens, statistics[0].numel(), *gates_BSH.stride(),
        GATED=gated, H=heads, BH=next_power_of_2(heads), BLOCK=64,
    )  # fmt: skip
    return statistics


@PreparedKernel
@triton.jit
def _transpose_statistics(
    lse, delta, gates, statistics, tokens, rows, g_b, g_s, g_h,
    GATED: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(tokens, BLOCK)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.arange(0, BH)[None, :]
    live = (token < tokens) & (head < H)
    source = (sequence * H + head) * tokens + token
    target = statistics + (sequence * tokens + token) * H + head
    tl.store(target, tl.load(lse + source, mask=live) * 1.4426950408889634, mask=live)
    gate = tl.load(gates + sequence * g_b + token * g_s + head * g_h, mask=live).to(tl.float32)
    row_delta = tl.load(delta + source, mask=live)
    if not GATED:
        row_delta /= tl.where(gate == 0.0, 1.0, gate)  # delta is 0 there
    tl.store(target + rows, row_delta, mask=live)
    tl.store(target + 2 * rows, gate, mask=live)
