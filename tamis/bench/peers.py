"""`tamis bench peers`: times other NSA implementations that are installed, ours and dense attention, on equal inputs.

Each peer is called through its public functions, with blocks compressed by their mean. A peer that fixes part of the
geometry runs with it, and ours is timed with the same geometry. `differs` is the relative RMSE from our output.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.attention import NSASpec, nsa
from tamis.attention.agreement import relative_rmse
from tamis.bench.attention import measure
from tamis.bench.branches import SHAPES, Shape, Timed
from tamis.bench.document import begin_document, kept_when_interrupted
from tamis.bench.sizes import print_other_tokens, sequences_in
from tamis.generate.load import device_for

Attention = Callable[..., Tensor]  # of q, k, v, gates and the NSASpec
OURS: Attention = nsa


@dataclass(frozen=True)
class Peer:
    """Another implementation: the packages it needs, how to install it, and how to call it."""

    name: str
    modules: tuple[str, ...]
    install: str
    attend: Attention
    one_block_size: bool = False  # compressed blocks are the selection blocks, without overlap


def flash_linear_attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, spec: NSASpec) -> Tensor:
    parallel_nsa = importlib.import_module("fla.ops.nsa").parallel_nsa
    compressed, selected, window = gates.unbind(-1)
    return parallel_nsa(
        q, k, v, compressed, selected, window, block_counts=spec.n_sel, block_size=spec.l_sel, window_size=spec.w
    )


def native_sparse_attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, spec: NSASpec) -> Tensor:
    ops = importlib.import_module("native_sparse_attention.ops")
    flash = importlib.import_module("flash_attn").flash_attn_func
    batch, tokens = q.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    (k_cmp, cmp_offsets), (v_cmp, _) = (ops.avgpool_compress(x, None, offsets, spec.l, spec.d) for x in rows[1:])
    compressed, ids = ops.compressed_attention(
        rows[0], k_cmp, v_cmp, spec.l, spec.d, spec.l_sel, spec.n_sel, offsets, cmp_offsets,
        tokens, spec.compressed_blocks(tokens), init_blocks=1, local_blocks=2,
    )  # fmt: skip
    selected = ops.topk_sparse_attention(*rows, ids, spec.l_sel, offsets)
    window = flash(q, k, v, causal=True, window_size=(spec.w - 1, 0))
    branches = (compressed.view_as(q), selected.view_as(q), window)
    return sum(gates[..., i, None] * out for i, out in enumerate(branches))  # type: ignore[return-value]


PEERS = [
    Peer("fla", ("fla.ops.nsa", "flash_attn"), "pip install flash-linear-attention flash-attn", flash_linear_attention,
         one_block_size=True),
    Peer("native-sparse-attention-triton", ("native_sparse_attention.ops", "flash_attn"),
         "pip install git+https://github.com/XunhaoLai/native-sparse-attention-triton flash-attn einops",
         native_sparse_attention),
]  # fmt: skip


def measure_peers(
    shape: str,
    lengths: Sequence[int],
    tokens: int,
    repeats: int,
    device: str | None = None,
    peers: Sequence[Peer] = PEERS,
) -> dict[str, Any]:
    """Measure ours, dense attention and every installed peer at each length; print the table, return the document."""
    target = device_for(device or "auto")
    dtype, sizes = torch.bfloat16 if target.type == "cuda" else torch.float32, SHAPES[shape]
    skipped = {peer.name: reason for peer in peers if (reason := why_not_installed(peer))}
    for peer in peers:
        if peer.name in skipped:
            print(f"{peer.name} is skipped: {skipped[peer.name]}; install it with: {peer.install}")
    installed = [peer for peer in peers if peer.name not in skipped]
    rows: list[dict[str, Any]] = []
    document = begin_document("peers", target) | {"dtype": str(dtype), "shape": shape, "skipped": skipped, "rows": rows}
    heads = f"{sizes.heads} heads in {sizes.groups} groups of dim {sizes.dim}"
    print(f"{document['device']}, {dtype}, {heads}, {tokens:,} tokens per call")
    print_other_tokens(tokens, lengths)
    print(f"{'length':>7} {'':34} {'forward ms':>11} {'both ms':>9} {'GiB':>6} {'differs':>8}")
    with kept_when_interrupted(document):
        for length in lengths:
            for row in _measure_length(sizes, installed, length, sequences_in(tokens, length), target, dtype, repeats):
                rows.append(row)
                _print_row(row)
    return document


def why_not_installed(peer: Peer) -> str | None:
    """Return the reason why a peer cannot be imported, or None."""
    for module in peer.modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a package built for another torch may raise anything
            return f"importing {module} fails: {str(error).splitlines()[0] if str(error) else error!r}"
    return None


def _measure_length(
    shape: Shape, peers: Sequence[Peer], length: int, batch: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[dict[str, Any]]:
    def normal(*sizes: int) -> Tensor:
        return torch.empty(batch, length, *sizes, dtype=dtype, device=device).normal_()

    q, k, v = (normal(heads, shape.dim) for heads in (shape.heads, shape.groups, shape.groups))
    inputs = [x.requires_grad_() for x in (q, k, v, torch.sigmoid(normal(shape.heads, 3)))]
    coarse = dataclasses.replace(shape.spec, l=shape.spec.l_sel, d=shape.spec.l_sel)
    contenders: list[tuple[str, Attention, NSASpec]] = [("dense", _dense, shape.spec), ("tamis", OURS, shape.spec)]
    if any(peer.one_block_size for peer in peers):
        contenders.append(("tamis, one block size", OURS, coarse))
    contenders += [(peer.name, peer.attend, coarse if peer.one_block_size else shape.spec) for peer in peers]
    for name, attend, spec in contenders:
        row = measure(_timed(name, attend, inputs, spec), device, repeats)
        row |= {"length": length, "batch": batch, "tokens": batch * length}
        if "error" not in row and attend not in (OURS, _dense):
            with torch.no_grad():
                row["differs"] = relative_rmse(attend(*inputs, spec), OURS(*inputs, spec))
        yield row


def _timed(name: str, attend: Attention, inputs: list[Tensor], spec: NSASpec) -> Timed:
    dout = torch.randn_like(inputs[0])

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs, spec)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs, spec), inputs, dout, allow_unused=True)

    return Timed(name, "", forward, both)


def _dense(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, spec: NSASpec) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _print_row(row: dict[str, Any]) -> None:
    cells = [("forward_ms", "11.3f"), ("both_ms", "9.3f"), ("peak_gib", "6.2f"), ("differs", "8.1e")]
    shown = (f"{'-':>{form.split('.')[0]}}" if row.get(key) is None else format(row[key], form) for key, form in cells)
    print(f"{row['length']:>7} {row['name']:34} {' '.join(shown)} {row.get('error', '')}".rstrip(), flush=True)
