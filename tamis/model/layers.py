"""The trunk's small parts: RMS norm, rotary positions, SwiGLU feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.model.ops.heads import turn
from tamis.model.ops.norm import add_and_norm
from tamis.model.ops.swiglu import swiglu


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)  # one launch, in float32 inside
        # In float32 whatever the compute dtype: the squares of bf16 activations lose too much.
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """`x + branch`, and its norm: on a GPU in one pass over memory."""
        if x.is_cuda:
            return add_and_norm(x, branch, self.weight, self.eps)
        x = x + branch
        return x, self(x)


class Rotary(nn.Module):
    """Tables of cosines and sines for positions 0 … length−1, applied per head to pairs (i, i + D/2)."""

    def __init__(self, dim: int, base: float, scale: float, length: int) -> None:
        super().__init__()
        # float64: at a million tokens a float32 angle is wrong by hundredths of a radian.
        frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64) / scale, frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
        return turn(x_BSHD, self.cos[positions_S], self.sin[positions_S])


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_and_up(x)))
