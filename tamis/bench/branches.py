"""What `tamis bench attention` times: the whole of NSA, its parts, the reference, and PyTorch's dense attention.

Each thing to time is a pair of calls, forward alone and forward with backward, on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis.attention import NSASpec, nsa_attention, reference
from tamis.attention.functional import why_no_kernels

CLUSTER = 128  # neighbouring tokens that look for the same blocks, in clustered inputs
DENSE = {"dense, cudnn": SDPBackend.CUDNN_ATTENTION, "dense, flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Shape:
    """Attention of one layer."""

    name: str
    heads: int
    groups: int
    dim: int
    spec: NSASpec


@dataclass(frozen=True)
class Timed:
    """A named pair of calls; `forward` may be missing from a part that exists in one direction only."""

    name: str
    choices: str
    forward: Callable[[], object]
    both: Callable[[], object] | None


SHAPES = {
    "m7c": Shape("m7c", heads=12, groups=2, dim=64, spec=NSASpec()),
    "paper": Shape("paper", heads=64, groups=4, dim=128, spec=NSASpec()),
    "tiny": Shape("tiny", heads=4, groups=2, dim=16, spec=NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)),
}


def make_inputs(
    shape: Shape, batch: int, length: int, device: torch.device, dtype: torch.dtype, clustered: bool
) -> list[Tensor]:
    """The tensor arguments of `nsa_attention`; clustered queries are alike among neighbours, so they choose alike."""
    blocks = shape.spec.compressed_blocks(length)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(batch, *sizes, dtype=dtype, device=device).normal_()

    q = normal(length, shape.heads, shape.dim)
    if clustered:
        common = normal(-(-length // CLUSTER), shape.heads, shape.dim).repeat_interleave(CLUSTER, dim=1)[:, :length]
        q = 2 * common + 0.2 * q
    keys = [normal(n, shape.groups, shape.dim) for n in (blocks, blocks, length, length, length, length)]
    return [x.requires_grad_() for x in (q, *keys, torch.sigmoid(normal(length, shape.heads, 3)))]


def whole(shape: Shape, inputs: list[Tensor], choices: str) -> Timed:
    dout, attend = torch.randn_like(inputs[0]), partial(nsa_attention, spec=shape.spec)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), inputs, dout)

    return Timed("whole", choices, forward, both)


def plain_reference(shape: Shape, inputs: list[Tensor]) -> Timed:
    """The specification itself; its backward keeps every score and rarely fits."""
    attend = partial(reference.nsa_attention, spec=shape.spec)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    return Timed("reference", "random", forward, None)


def dense(inputs: list[Tensor]) -> Iterator[Timed]:
    """PyTorch's causal attention over the same queries with one set of keys and values."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (inputs[0], inputs[3], inputs[4]))
    dout = torch.randn_like(q)
    for name, backend in DENSE.items():

        def forward(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def both(forward: Callable[[], Tensor] = forward) -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), (q, k, v), dout)

        yield Timed(name, "", forward, both)


def parts(shape: Shape, inputs: list[Tensor], choices: str) -> Iterator[Timed]:
    """The kernels of each branch alone, as the whole runs them; but the whole writes dq of all branches in one pass."""
    if why_no_kernels(inputs[0].device, inputs[0].dtype, shape.dim):
        return
    from tamis.attention.kernels.banded.keys import key_gradients
    from tamis.attention.kernels.banded.queries import Rows
    from tamis.attention.kernels.banded.query_gradients import write_query_gradient
    from tamis.attention.kernels.gates import mix_backward
    from tamis.attention.kernels.selected.backward import selected_backward
    from tamis.attention.kernels.selected.pairs import selected_forward
    from tamis.attention.kernels.selection import select_from_lse
    from tamis.attention.op import compressed_band, compressed_forward, prefix_of, window_band, window_forward

    spec = shape.spec
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = (x.detach() for x in inputs)
    dout, dq = torch.randn_like(q), torch.zeros_like(q)
    cmp, lse_cmp = compressed_forward(q, k_cmp, v_cmp, spec)
    ids = select_from_lse(q, k_cmp, lse_cmp, spec)
    sel, lse_sel = selected_forward(q, k_sel, v_sel, ids, spec)
    win, lse_win = window_forward(q, k_win, v_win, spec)
    _, weights, delta = mix_backward(dout, cmp, sel, win, gates)
    compressed = compressed_band(k_cmp, v_cmp, spec), Rows(lse_cmp, weights[0], delta[0])
    window = window_band(k_win, v_win, spec), Rows(lse_win, weights[2], delta[2])
    prefix = prefix_of(q, k_sel, v_sel, dout, Rows(lse_sel, weights[1], delta[1]), spec)
    of_selected = ids, lse_sel, dout, gates[..., 1], delta[1], dq, spec

    def pair(name: str, forward: Callable[[], object], backward: Callable[[], object]) -> Timed:
        return Timed(name, choices, forward, lambda: (forward(), backward()))

    yield pair(
        "selected",
        lambda: selected_forward(q, k_sel, v_sel, ids, spec, trusted=True),
        lambda: selected_backward(q, k_sel, v_sel, *of_selected, trusted=True, prefix=prefix),
    )
    if choices != "random":
        return  # the other parts do not depend on what is chosen
    yield pair(
        "compressed",
        lambda: compressed_forward(q, k_cmp, v_cmp, spec),
        lambda: key_gradients(q, *compressed, dout),
    )
    yield Timed("selection", choices, lambda: select_from_lse(q, k_cmp, lse_cmp, spec), None)
    yield pair("window", lambda: window_forward(q, k_win, v_win, spec), lambda: key_gradients(q, *window, dout))
    # Both dense branches share one pass over the queries.
    yield pair(
        "dense dq", lambda: None, lambda: write_query_gradient(q, dout, dq, window[0].scale, (window, compressed))
    )
    # Forward, the selected branch applies the gates.
    yield pair("gates", lambda: None, lambda: mix_backward(dout, cmp, sel, win, gates))


def least_work(shape: Shape, batch: int, length: int, element_size: int) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes that forward, and forward with backward, cannot do without: the floor of the roofline.

    Each query meets its visible keys in two products forward (one more to score blocks) and five backward; every tensor
    and its gradient cross memory once.
    """
    spec, positions = shape.spec, torch.arange(1, length + 1, dtype=torch.float64)
    compressed = ((positions - spec.l).div(spec.d, rounding_mode="floor") + 1).clamp(min=0).sum().item()
    selected = positions.clamp(max=spec.n_sel * spec.l_sel).sum().item()
    window = positions.clamp(max=spec.w).sum().item()
    product = 2.0 * batch * shape.heads * shape.dim
    forward = product * (3 * compressed + 2 * selected + 2 * window)
    backward = product * 5 * (compressed + selected + window)
    blocks = spec.compressed_blocks(length)
    queries = batch * length * shape.heads * shape.dim * element_size
    keys = batch * (2 * blocks + 4 * length) * shape.groups * shape.dim * element_size
    return {"forward": (forward, 2 * queries + keys), "both": (forward + backward, 5 * queries + 3 * keys)}
