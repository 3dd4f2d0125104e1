"""The one door to attention: checks the inputs, then runs the kernels or the reference.

Which one runs depends on where the tensors are, never on a switch that changes what is computed.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from tamis.attention import reference
from tamis.attention.spec import NSASpec, check_inputs, check_queries

Backend = Literal["auto", "reference", "triton"]


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
    backend: Backend = "auto",
) -> Tensor:
    """Native Sparse Attention: `[B,S,H,D]` from queries, three branches of keys and values, and gates `[B,S,H,3]`."""
    check_inputs(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec)
    return reference.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec)


def select_blocks(q: Tensor, k_cmp: Tensor, spec: NSASpec, backend: Backend = "auto") -> Tensor:
    """Ids of the blocks each query and group attends to: `[B,S,G,n_sel]` int32, ascending, then −1 for unused ones."""
    check_queries(q, k_cmp, spec)
    return reference.select_blocks(q, k_cmp, spec)
