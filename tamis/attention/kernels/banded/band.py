"""What a dense branch is to its kernels: keys, which tokens see them, and what the backward pass knows of its rows.

Shapes: B batch, S tokens, H heads, N keys, G groups, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Keys and values `[B,N,G,D]` with unit stride in D; key `n` ends at position `n·stride + length − 1`.

    It is visible from there on, and with a window only to the `window` tokens that follow.
    """

    k: Tensor
    v: Tensor
    length: int
    stride: int
    window: int

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.k.stride()[:3], *self.v.stride()[:3]


@dataclass(frozen=True)
class Rows:
    """Log-sum-exp, gate and `delta = gate·<dout, out>` of every row, `[B,H,S]` float32.

    Half-precision numbers one by one cannot be read ahead, and would stall every step.
    """

    lse: Tensor
    gate: Tensor
    delta: Tensor
