"""Window branch: each query attends to the `w` newest tokens, its own included."""

from __future__ import annotations

from torch import Tensor

from tamis.attention.checks import (
    check_branch,
    check_contiguous,
    check_gradients,
    check_queries,
    check_start,
)
from tamis.attention.kernels.banded import forward as banded
from tamis.attention.kernels.banded.band import Band, Rows
from tamis.attention.kernels.launch import unit_last_stride
from tamis.attention.spec import NSASpec


def window_band(k_win: Tensor, v_win: Tensor, spec: NSASpec) -> Band:
    return Band(unit_last_stride(k_win), unit_last_stride(v_win), length=1, stride=1, window=spec.w)


def window_forward(
    q: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    spec: NSASpec,
    start: int = 0,
    first_key: int = 0,
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and log-sum-exp `[B,H,S]`; the first key is that of position `first_key`."""
    if not trusted:
        check_queries(q)
        check_start(start, first_key, spec.w)
        check_branch(q, start + q.shape[1] - first_key, k_win=k_win, v_win=v_win)
    return banded.forward(q, window_band(k_win, v_win, spec), start - first_key)


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
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of the window's keys and values; `dq` is written, or added to."""
    if not trusted:
        check_queries(q)
        check_branch(q, q.shape[1], k_win=k_win, v_win=v_win)
        check_gradients(q, dout, dq, lse=lse, gate=gate, delta=delta)
        check_contiguous(dq=dq)
    return banded.backward(q, window_band(k_win, v_win, spec), Rows(lse, gate, delta), dout, dq, accumulate_dq)
