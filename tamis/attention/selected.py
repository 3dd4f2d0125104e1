"""Attention over the chosen blocks, forward and backward, as plain functions over Triton kernels.

Shapes: B batch, S tokens, H query heads, G key/value groups, D head dim, n = n_sel.
"""

from __future__ import annotations

from torch import Tensor

from tamis.attention import selected_pairs
from tamis.attention.spec import NSASpec


def selected_forward(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, ids_BSGn: Tensor, spec: NSASpec
) -> tuple[Tensor, Tensor]:
    """Output `[B,S,H,D]` before the gate, and natural log-sum-exp `[B,H,S]` in float32; 0 and −inf where nothing is seen."""
    q, k, v, ids = (_unit_last_stride(x) for x in (q_BSHD, k_BSGD, v_BSGD, ids_BSGn))
    return selected_pairs.forward(q, k, v, ids, spec)


def selected_backward(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    ids_BSGn: Tensor,
    lse_BHS: Tensor,
    dout_BSHD: Tensor,
    gates_BSH3: Tensor,
    delta_BHS: Tensor,
    branch: int,
    dq_BSHD: Tensor,
    spec: NSASpec,
    accumulate_dq: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; q's is written to `dq`, or added to it. `dout` is the gradient of the mixed output."""
    q, k, v, ids, dout = (_unit_last_stride(x) for x in (q_BSHD, k_BSGD, v_BSGD, ids_BSGn, dout_BSHD))
    gates = gates_BSH3[..., branch]
    lse, delta = lse_BHS.contiguous(), delta_BHS.contiguous()
    return selected_pairs.backward(q, k, v, ids, lse, dout, gates, delta, dq_BSHD, spec, accumulate_dq)


def _unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
