"""Window branch: each query attends to the `w` newest tokens, its own included."""

from __future__ import annotations

from torch import Tensor

from tamis.attention import banded
from tamis.attention.spec import NSASpec


def window_forward(
    q: Tensor, k_win: Tensor, v_win: Tensor, spec: NSASpec, start: int = 0, first_key: int = 0
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and log-sum-exp `[B,H,S]`; the first key is that of position `first_key`."""
    return banded.forward(q, k_win, v_win, length=1, stride=1, window=spec.w, start=start - first_key)


def window_backward(
    q: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    lse: Tensor,
    dout: Tensor,
    gate: Tensor,
    delta: Tensor,
    dq: Tensor,
    spec: NSASpec,
    accumulate_dq: bool,
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of the window's keys and values; `dq` is written, or added to."""
    return banded.backward(
        q, k_win, v_win, lse, dout, gate, delta, dq, accumulate_dq, length=1, stride=1, window=spec.w
    )
