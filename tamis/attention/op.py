"""The kernels as torch operations: one forward and two backward, with fake implementations, tied by autograd.

Safe under torch.compile (no graph break) and CUDA graphs (the host reads nothing, no grid depends on data). The spec is
passed as its five whole numbers, since an operation's arguments are tensors and numbers. `functional` has checked the
inputs, and nothing is checked again.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tamis.attention.checks import Layouts, check_branch, check_queries, check_start, compressed_blocks
from tamis.attention.kernels.banded.keys import key_gradients
from tamis.attention.kernels.banded.queries import Band, Rows, banded_forward, copies_boxes
from tamis.attention.kernels.gates import NOT_MIXED, Mixture, gate_gradients, planes_shape, weights_and_delta
from tamis.attention.kernels.launch import SideStream, fills_the_gpu, softmax_scale, unit_last_stride
from tamis.attention.kernels.selected.backward import selected_backward, takes_prefix
from tamis.attention.kernels.selected.pairs import selected_forward
from tamis.attention.kernels.selection import select_from_lse
from tamis.attention.kernels.tape import PLAIN, empty, repeat
from tamis.attention.kernels.tuned import with_fallback
from tamis.attention.packing import PackedTables, ids_in_documents, ids_in_row
from tamis.attention.spec import NSASpec, Start, latest_start

COMPRESSED, SELECTED, WINDOW = 0, 1, 2


def run_forward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: list[int],
    packed: Tensor | None = None,
    documents: int = 0,
    max_seqlen: int = 0,
    scale: float | None = None,
    block_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mixed output, three ungated outputs, their log-sum-exps, block ids).

    `packed` is a `PackedRow.flat` of so many documents of at most `max_seqlen` tokens. Given `block_ids` count from the
    document's first block, those returned from the row's.
    """
    inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    return _run_forward(None, inputs, spec, packed, documents, max_seqlen, scale, block_ids)


def _run_forward(layouts, inputs, spec, packed, documents, max_seqlen, scale, block_ids):
    ids, gates = None, inputs[7].contiguous()
    if block_ids is not None:
        ids = ids_in_row(block_ids, _tables(packed, documents, max_seqlen, inputs[0], _spec_of(*spec)))
    if gates is not inputs[7]:
        inputs, layouts = (*inputs[:7], gates), None
    numbers = (*spec, documents, max_seqlen, scale)
    return with_fallback(lambda: repeat(_forward, (*inputs, packed, ids), numbers, layouts))


def _forward(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, packed, ids, *numbers):
    *spec, documents, max_seqlen, scale = numbers
    geometry = _spec_of(*spec)
    tables = _tables(packed, documents, max_seqlen, q, geometry)
    branches = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    return attend(q, branches, gates, geometry, packed=tables, scale=scale, ids=ids)


def attend(
    q: Tensor,
    keys_and_values: Sequence[Tensor],
    gates: Tensor,
    spec: NSASpec,
    start: Start = 0,
    first_key: int = 0,
    packed: PackedTables | None = None,
    scale: float | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `nsa_forward`, for queries from position `start` on; the window's keys begin at `first_key`."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = keys_and_values
    gates = gates.contiguous()
    out = empty(q.shape, q.dtype, q.device)
    side = SideStream(q)
    window = partial(window_forward, q, k_win, v_win, spec, start, first_key, True, packed, scale)
    window_is_last = fills_the_gpu(q) and copies_boxes(q, k_win, v_win, latest_start(start) - first_key)
    if not window_is_last:  # first: it is long and waits for nothing, and hides the host's time for other launches
        with _range("window"):
            out_win, lse_win = window()
    with side:
        with _range("compressed"):
            out_cmp, lse_cmp = compressed_forward(q, k_cmp, v_cmp, spec, start, True, packed, scale)
        with _range("selection"):
            if ids is None:
                ids = select_from_lse(q, k_cmp, lse_cmp, spec, start, True, packed, scale)
        with _range("selected"):
            mixture = None if window_is_last else Mixture(out, gates, out_cmp, out_win, side.wait)
            out_sel, lse_sel = selected_forward(q, k_sel, v_sel, ids, spec, start, True, packed, scale, mixture)
    if window_is_last:  # its kernel has the registers to mix the branches
        with _range("window"):
            out_win, lse_win = window((out, gates, out_cmp, out_sel))
    return out, out_cmp, out_sel, out_win, lse_cmp, lse_sel, lse_win, ids


nsa_forward = torch.library.custom_op("tamis::nsa_forward", run_forward, mutates_args=())


@nsa_forward.register_fake
def _(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec, *rest):  # type: ignore[no-untyped-def]
    B, S, H, _ = q.shape
    outs = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(4)]
    lses = [q.new_empty((B, H, S), dtype=torch.float32) for _ in range(3)]
    return *outs, *lses, q.new_empty((B, S, k_sel.shape[2], spec[3]), dtype=torch.int32)


def run_gate_gradients(
    dout: Tensor, out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the gates, and for `nsa_backward` the gate and the delta of every row and branch.

    An operation of its own, because nothing else needs the branches' outputs: their memory then serves what follows.
    """
    return gate_gradients(unit_last_stride(dout), out_cmp, out_sel, out_win, gates.contiguous())


nsa_gate_gradients = torch.library.custom_op("tamis::nsa_gate_gradients", run_gate_gradients, mutates_args=())


@nsa_gate_gradients.register_fake
def _(dout, out_cmp, out_sel, out_win, gates):  # type: ignore[no-untyped-def]
    planes = gates.new_empty(planes_shape(*out_cmp.shape[:3]), dtype=torch.float32)
    return torch.empty(gates.shape, dtype=gates.dtype, device=gates.device), planes


def run_backward(
    dout: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    lse_cmp: Tensor,
    lse_sel: Tensor,
    lse_win: Tensor,
    ids: Tensor,
    planes: Tensor,
    spec: list[int],
    packed: Tensor | None = None,
    documents: int = 0,
    max_seqlen: int = 0,
    scale: float | None = None,
    given_ids: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q and of the three branches' keys and values; `planes` are those of `nsa_gate_gradients`.

    `given_ids`: the forward pass was given its block ids, and early tokens may have chosen fewer blocks than there are.
    """
    tensors = (
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates.contiguous(), unit_last_stride(dout), lse_cmp, lse_sel,
        lse_win, ids, planes, packed,
    )  # fmt: skip
    numbers = (*spec, documents, max_seqlen, scale, given_ids)
    return with_fallback(lambda: repeat(_backward, tensors, numbers))  # type: ignore[no-any-return]


def _backward(
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, dout, lse_cmp, lse_sel, lse_win, ids, planes, packed, *numbers,
):  # fmt: skip
    *spec, documents, max_seqlen, scale, given_ids = numbers
    geometry = _spec_of(*spec)
    tables = _tables(packed, documents, max_seqlen, q, geometry)
    weights, delta = weights_and_delta(planes, *q.shape[:3])
    window = window_band(k_win, v_win, geometry, tables, scale), Rows(lse_win, weights[WINDOW], delta[WINDOW])
    statistics = Rows(lse_cmp, weights[COMPRESSED], delta[COMPRESSED])
    compressed = compressed_band(k_cmp, v_cmp, geometry, tables, scale), statistics
    statistics = Rows(lse_sel, weights[SELECTED], delta[SELECTED])
    prefix = None if given_ids else prefix_of(q, k_sel, v_sel, dout, statistics, geometry, tables, scale)
    dq = empty(q.shape, q.dtype, q.device)
    side = SideStream(q)
    # Before the many short launches of the selected branch, whose host time they hide.
    dk_win, dv_win = key_gradients(q, *window, dout)
    dk_cmp, dv_cmp = key_gradients(q, *compressed, dout)
    with side:
        dk_sel, dv_sel = selected_backward(
            q, k_sel, v_sel, ids, lse_sel, dout, gates[..., SELECTED], delta[SELECTED], dq, geometry, trusted=True,
            packed=tables, scale=scale, dense=(window, compressed), prefix=prefix,
        )  # fmt: skip
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win


nsa_backward = torch.library.custom_op("tamis::nsa_backward", run_backward, mutates_args=())


@nsa_backward.register_fake
def _(dout, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *saved):  # type: ignore[no-untyped-def]
    inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def gradients(
    dout: Tensor, saved: list[Tensor], *numbers: Any, of_gates: Any = run_gate_gradients, of_others: Any = run_backward
) -> tuple[Tensor, ...]:
    """Gradients of the eight inputs; `saved` are those and all that the forward pass returned but the mixed output.

    The branches' outputs are taken off the list, and freed if nothing else holds them: it saves 0.3 GiB at 64k tokens.
    """
    dout, saved[7] = unit_last_stride(dout), saved[7].contiguous()  # one copy for both operations, if any
    dgates, planes = of_gates(dout, *saved[8:11], saved[7])
    del saved[8:11]
    return *of_others(dout, *saved, planes, *numbers), dgates


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.spec, packed, documents, max_seqlen, scale, block_ids = inputs
    ctx.numbers = documents, max_seqlen, scale, block_ids is not None
    ctx.set_materialize_grads(False)  # else the unused outputs get gradients of zeros, 0.3 GiB at 64k tokens
    ctx.save_for_backward(packed, *tensors, *output[1:])


def _registered_gradients(ctx: Any, dout: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    packed, *saved = ctx.saved_tensors
    numbers = ctx.spec, packed, *ctx.numbers
    of_inputs = gradients(dout, saved, *numbers, of_gates=nsa_gate_gradients, of_others=nsa_backward)
    return *of_inputs, None, None, None, None, None, None


nsa_forward.register_autograd(_registered_gradients, setup_context=_save)


class _EagerAttention(torch.autograd.Function):
    """The operations without torch's dispatcher, which takes the host longer than all launches before the first
    long kernel. The kernels of the forward pass are launched before, so that the GPU does not wait for autograd. The
    mixed output alone has a gradient: autograd takes microseconds for every other tensor that it returns."""

    @staticmethod
    def forward(ctx: Any, output: tuple[Tensor, ...], others: tuple[Any, ...], *inputs: Tensor) -> Tensor:
        _save(ctx, (*inputs, *others), output)
        return output[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        packed, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: here the list alone holds them
        return None, None, *gradients(dout, saved, ctx.spec, packed, *ctx.numbers)


def attention(inputs: tuple[Tensor, ...], *others: Any, layouts: Layouts | None = None) -> tuple[Tensor, ...]:
    """`nsa_forward` with gradients, on the shortest way: tracers and dispatch modes need the registered operation.

    `layouts` are those of the eight inputs, if they are known.
    """
    traced = torch.compiler.is_compiling() or type(inputs[0]) not in PLAIN or is_in_torch_dispatch_mode()
    if traced:
        return nsa_forward(*inputs, *others)  # type: ignore[no-any-return]
    output = _run_forward(layouts, inputs, *others)
    return _EagerAttention.apply(output, others, *inputs), *output[1:]  # type: ignore[no-untyped-call]


@lru_cache
def _spec_of(*numbers: int) -> NSASpec:
    return NSASpec(*numbers)


@torch.library.custom_op("tamis::select_blocks", mutates_args=())
def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    spec: list[int],
    packed: Tensor | None = None,
    documents: int = 0,
    max_seqlen: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Block ids alone, counted from the document's first block; the compressed branch runs for its log-sum-exp."""
    geometry = _spec_of(*spec)
    tables = _tables(packed, documents, max_seqlen, q, geometry)
    _, lse = compressed_forward(q, k_cmp, k_cmp, geometry, trusted=True, packed=tables, scale=scale)
    ids = select_from_lse(q, k_cmp, lse, geometry, trusted=True, packed=tables, scale=scale)
    return ids if tables is None else ids_in_documents(ids, tables)


@select_blocks.register_fake
def _(q, k_cmp, spec, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[1], k_cmp.shape[2], spec[3]), dtype=torch.int32)


def _tables(packed: Tensor | None, documents: int, longest: int, q: Tensor, spec: NSASpec) -> PackedTables | None:
    return None if packed is None else PackedTables.of(packed, documents, q.shape[1], longest, spec)


def _range(name: str) -> AbstractContextManager[Any]:
    """A named range for a running profiler. Without one `record_function` would still cost about 10 µs of host time."""
    profiling = torch.autograd.profiler._is_profiler_enabled
    return torch.profiler.record_function(name) if profiling else nullcontext()


def compressed_band(
    k: Tensor, v: Tensor, spec: NSASpec, packed: PackedTables | None = None, scale: float | None = None
) -> Band:
    tables = (packed.token, packed.compressed, packed.tile) if packed else ()
    return Band(unit_last_stride(k), unit_last_stride(v), spec.l, spec.d, 0, softmax_scale(k, scale), *tables)


def compressed_forward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    start: Start = 0,
    trusted: bool = False,
    packed: PackedTables | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and log-sum-exp `[B,H,S]`; exactly 0 and −inf where no block is visible."""
    if not trusted:
        check_branch(q, compressed_blocks(q, spec, latest_start(start)), k_cmp=k_cmp, v_cmp=v_cmp)
    return banded_forward(q, compressed_band(k_cmp, v_cmp, spec, packed, scale), start)


def window_band(
    k: Tensor, v: Tensor, spec: NSASpec, packed: PackedTables | None = None, scale: float | None = None
) -> Band:
    tables = (packed.token, packed.token) if packed else (None, None)
    return Band(unit_last_stride(k), unit_last_stride(v), 1, 1, spec.w, softmax_scale(k, scale), *tables)


def prefix_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Rows,
    spec: NSASpec,
    packed: PackedTables | None = None,
    scale: float | None = None,
) -> tuple[Band, Rows] | None:
    """The selected branch as the tokens of a prefix see it, if `takes_prefix`: one run of keys up to their own."""
    if not takes_prefix(q, dout, rows, spec, packed):
        return None
    band = window_band(k, v, replace(spec, w=spec.n_sel * spec.l_sel), packed, scale)
    return band._replace(is_prefix=True), rows


def window_forward(
    q: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    spec: NSASpec,
    start: Start = 0,
    first_key: int = 0,
    trusted: bool = False,
    packed: PackedTables | None = None,
    scale: float | None = None,
    mixture: tuple[Tensor | None, ...] = NOT_MIXED,
) -> tuple[Tensor, Tensor]:
    """Ungated output `[B,S,H,D]` and log-sum-exp `[B,H,S]`; the first key has position `first_key`.

    Only the distance between the first query and the first key counts: it is the same for every tile of a graph.
    """
    distance = latest_start(start) - first_key
    if not trusted:
        check_queries(q)
        check_start(latest_start(start), first_key, spec.w)
        check_branch(q, distance + q.shape[1], k_win=k_win, v_win=v_win)
    return banded_forward(q, window_band(k_win, v_win, spec, packed, scale), distance, mixture)
