"""The kernels as one torch operation: a forward and a backward op with fake implementations, tied by autograd.

Safe under torch.compile (no graph break) and CUDA graphs (nothing is read by the host, no grid depends on data).
The spec travels as its five whole numbers, since an operation's arguments are tensors and numbers. Inputs were checked
before they come here, and nothing is checked again.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tamis.attention.kernels.banded import dkv as banded_keys
from tamis.attention.kernels.banded import forward as banded
from tamis.attention.kernels.banded.band import Rows
from tamis.attention.kernels.compressed import compressed_band, compressed_forward
from tamis.attention.kernels.gates import mix_backward, mix_forward
from tamis.attention.kernels.selected.branch import selected_backward, selected_forward
from tamis.attention.kernels.selection import select_from_lse
from tamis.attention.kernels.window import window_band, window_forward
from tamis.attention.spec import NSASpec

COMPRESSED, SELECTED, WINDOW = 0, 1, 2


@torch.library.custom_op("tamis::nsa_forward", mutates_args=())
def nsa_forward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mixed output, three ungated outputs, their log-sum-exps, block ids)."""
    return attend(q, (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win), gates, NSASpec(*spec))


def attend(
    q: Tensor, keys_and_values: Sequence[Tensor], gates: Tensor, spec: NSASpec, start: int = 0, first_key: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `nsa_forward` gives, of queries from position `start` on; the window's keys begin at `first_key`."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = keys_and_values
    with _range("compressed"):
        out_cmp, lse_cmp = compressed_forward(q, k_cmp, v_cmp, spec, start, trusted=True)
    with _range("selection"):
        ids = select_from_lse(q, k_cmp, lse_cmp, spec, start, trusted=True)
    with _range("selected"):
        out_sel, lse_sel = selected_forward(q, k_sel, v_sel, ids, spec, start, trusted=True)
    with _range("window"):
        out_win, lse_win = window_forward(q, k_win, v_win, spec, start, first_key, trusted=True)
    out = mix_forward(out_cmp, out_sel, out_win, gates.contiguous(), trusted=True)
    return out, out_cmp, out_sel, out_win, lse_cmp, lse_sel, lse_win, ids


@nsa_forward.register_fake
def _(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec):  # type: ignore[no-untyped-def]
    B, S, H, _ = q.shape
    outs = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(4)]
    lses = [q.new_empty((B, H, S), dtype=torch.float32) for _ in range(3)]
    return *outs, *lses, q.new_empty((B, S, k_sel.shape[2], spec[3]), dtype=torch.int32)


@torch.library.custom_op("tamis::nsa_backward", mutates_args=())
def nsa_backward(
    dout: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    out_cmp: Tensor,
    out_sel: Tensor,
    out_win: Tensor,
    lse_cmp: Tensor,
    lse_sel: Tensor,
    lse_win: Tensor,
    ids: Tensor,
    spec: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the three branches' keys and values, and the gates."""
    geometry, gates = NSASpec(*spec), gates.contiguous()
    dgates, weights, delta = mix_backward(dout, out_cmp, out_sel, out_win, gates, trusted=True)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk_sel, dv_sel = selected_backward(
        q, k_sel, v_sel, ids, lse_sel, dout, gates, delta[SELECTED], SELECTED, dq, geometry, trusted=True
    )
    # Both dense branches add to dq in one pass over the queries.
    window = window_band(k_win, v_win, geometry), Rows(lse_win, weights[WINDOW], delta[WINDOW])
    compressed = compressed_band(k_cmp, v_cmp, geometry), Rows(lse_cmp, weights[COMPRESSED], delta[COMPRESSED])
    banded.query_gradient(q, dout, dq, True, window, compressed)
    dk_cmp, dv_cmp = banded_keys.gradients(q, *compressed, dout)
    dk_win, dv_win = banded_keys.gradients(q, *window, dout)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


@nsa_backward.register_fake
def _(dout, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *saved):  # type: ignore[no-untyped-def]
    inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.spec = inputs
    ctx.set_materialize_grads(False)  # else the unused outputs get gradients of zeros, 0.3 GiB at 64k tokens
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx: Any, dout: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    return *nsa_backward(dout, *ctx.saved_tensors, ctx.spec), None


nsa_forward.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("tamis::select_blocks", mutates_args=())
def select_blocks(q: Tensor, k_cmp: Tensor, spec: list[int]) -> Tensor:
    """Block ids alone; the compressed branch runs for its log-sum-exp."""
    geometry = NSASpec(*spec)
    _, lse = compressed_forward(q, k_cmp, k_cmp, geometry, trusted=True)
    return select_from_lse(q, k_cmp, lse, geometry, trusted=True)


@select_blocks.register_fake
def _(q, k_cmp, spec):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[1], k_cmp.shape[2], spec[3]), dtype=torch.int32)


def _range(name: str) -> AbstractContextManager[Any]:
    """A named range for a running profiler. Without one `record_function` would still cost about 10 µs of host time."""
    profiling = torch.autograd.profiler._is_profiler_enabled
    return torch.profiler.record_function(name) if profiling else nullcontext()


def as_numbers(spec: NSASpec) -> list[int]:
    return [spec.l, spec.d, spec.l_sel, spec.n_sel, spec.w]
