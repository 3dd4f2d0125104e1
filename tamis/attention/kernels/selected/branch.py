"""Attention over the chosen blocks, forward and backward, as plain functions over Triton kernels.

Two forms compute it. `selected_union`: a tile of neighbouring queries walks the union of its blocks; best where that
union is short. `selected_pairs`: each block meets the queries that chose it; best where neighbours choose differently.
The forward pass counts each tile's union on the device and takes the better form tile by tile; the backward pass always
takes the pairs (`selected_gradients`), whose work is exact: one sweep gives all three gradients.

Shapes: B batch, S queries, T = start + S keys, H query heads, G key/value groups, D head dim, n = n_sel.
"""

from __future__ import annotations

from torch import Tensor

from tamis.attention.checks import (
    check_branch,
    check_gradients,
    check_ids,
    check_like,
    check_queries,
    check_start,
)
from tamis.attention.kernels.launch import unit_last_stride
from tamis.attention.kernels.selected import backward as selected_gradients
from tamis.attention.kernels.selected import pairs as selected_pairs
from tamis.attention.kernels.selected import union as selected_union
from tamis.attention.spec import NSASpec

DENSE_UP_TO = 4  # times n_sel blocks: in sequences this short the union beats the lists whatever was chosen; measured


def selected_forward(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    ids_BSGn: Tensor,
    spec: NSASpec,
    start: int = 0,
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output `[B,S,H,D]` before the gate, and natural log-sum-exp `[B,H,S]` in float32.

    Rows that see nothing give 0 and −inf. Queries stand at `start … start+S−1` over the keys of all tokens so far.
    The host looks at the ids, and waits for them, unless the inputs are trusted.
    """
    if not trusted:
        _check(q_BSHD, k_BTGD, v_BTGD, ids_BSGn, spec, start)
    q, k, v, ids = (unit_last_stride(x) for x in (q_BSHD, k_BTGD, v_BTGD, ids_BSGn))
    if spec.selection_blocks(start + q.shape[1]) <= DENSE_UP_TO * spec.n_sel:
        out, lse, _ = selected_union.forward(q, k, v, ids, spec, every_tile=True, start=start)
        return out, lse
    tiles_with_short_unions = selected_union.forward(q, k, v, ids, spec, every_tile=False, start=start)
    return selected_pairs.forward(q, k, v, ids, spec, rest_of=tiles_with_short_unions, start=start)


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
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; q's is written to `dq`, or added to it. `dout` is the gradient of the mixed output."""
    if not trusted:
        _check(q_BSHD, k_BSGD, v_BSGD, ids_BSGn, spec)
        check_gradients(q_BSHD, dout_BSHD, dq_BSHD, lse=lse_BHS, delta=delta_BHS)
        check_like("q", q_BSHD, gates=(gates_BSH3, (*q_BSHD.shape[:3], 3)))
        if branch not in (0, 1, 2):
            raise ValueError(f"branch must be 0, 1 or 2, the gate that is this branch's, got {branch}")
    q, k, v, ids, dout = (unit_last_stride(x) for x in (q_BSHD, k_BSGD, v_BSGD, ids_BSGn, dout_BSHD))
    gates = gates_BSH3[..., branch]
    return selected_gradients.backward(q, k, v, ids, lse_BHS, dout, gates, delta_BHS, dq_BSHD, spec, accumulate_dq)


def _check(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, spec: NSASpec, start: int = 0) -> None:
    check_queries(q)
    check_start(start)
    tokens = start + q.shape[1]
    groups = check_branch(q, tokens, k_sel=k, v_sel=v)
    check_ids(ids, q, groups, spec.selection_blocks(tokens), spec)
