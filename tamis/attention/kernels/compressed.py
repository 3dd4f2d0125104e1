"""Compressed branch: each query attends to the compressed blocks that end at or before it."""

from __future__ import annotations

from torch import Tensor

from tamis.attention.checks import check_branch, check_contiguous, check_gradients, compressed_blocks
from tamis.attention.kernels.banded import forward as banded
from tamis.attention.kernels.banded.band import Band, Rows
from tamis.attention.kernels.launch import unit_last_stride
from tamis.attention.spec import NSASpec


def compressed_band(k_cmp: Tensor, v_cmp: Tensor, spec: NSASpec) -> Band:
    return Band(unit_last_stride(k_cmp), unit_last_stride(v_cmp), spec.l, spec.d, window=0)


def compressed_forward(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, spec: NSASpec, start: int = 0, trusted: bool = False
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and log-sum-exp `[B,H,S]`; exactly 0 and −inf where no block is visible."""
    if not trusted:
        check_branch(q, compressed_blocks(q, spec, start), k_cmp=k_cmp, v_cmp=v_cmp)
    return banded.forward(q, compressed_band(k_cmp, v_cmp, spec), start)


def compressed_backward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    lse: Tensor,
    dout: Tensor,
    gate: Tensor,
    delta: Tensor,
    dq: Tensor,
    spec: NSASpec,
    accumulate_dq: bool,
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of the compressed keys and values; `dq` is written, or added to."""
    if not trusted:
        check_branch(q, compressed_blocks(q, spec), k_cmp=k_cmp, v_cmp=v_cmp)
        check_gradients(q, dout, dq, lse=lse, gate=gate, delta=delta)
        check_contiguous(dq=dq)
    return banded.backward(q, compressed_band(k_cmp, v_cmp, spec), Rows(lse, gate, delta), dout, dq, accumulate_dq)
