"""The one door to attention: checks the inputs, then runs the Triton kernels or the reference.

Which one runs depends on where the tensors are, never on a switch that changes what is computed; `describe` names it
and why, and `verify.verify` proves that both agree on the present device.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from tamis.attention import reference
from tamis.attention.checks import (
    check_branch,
    check_cu_seqlens,
    check_ids,
    check_inputs,
    check_layout,
    check_no_later_blocks,
    check_once,
    compressed_blocks,
)
from tamis.attention.compress import MeanCompression
from tamis.attention.kernels.tiles import SMALL_MEMORY
from tamis.attention.packing import PackedRow, as_row, positions_in_documents
from tamis.attention.spec import NSASpec, as_numbers

Backend = Literal["auto", "reference", "triton"]

HAVE_TRITON = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_DIM, DIM_STEP, WIDEST_GROUP = 256, 16, 64  # what tests/gpu/matrix.py proves
OLDEST_GPU = (8, 0)


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
    *,
    cu_seqlens: Tensor | PackedRow | None = None,
    scale: float | None = None,
    block_ids: Tensor | None = None,
    return_lse: bool = False,
    max_seqlen: int | None = None,
) -> Any:
    """Native Sparse Attention over separate keys and values for each branch.

    Args:
        q: queries `[B,S,H,D]`.
        k_cmp, v_cmp: compressed keys and values `[B,Nc,G,D]`, with `Nc = spec.compressed_blocks(S)`.
        k_sel, v_sel, k_win, v_win: keys and values of the selected and the window branch, `[B,S,G,D]`.
        gates: weights of the compressed, selected and window branches after the sigmoid, `[B,S,H,3]`.
        spec: block sizes and counts.
        backend: `"auto"` (kernels on a GPU, else the reference), `"reference"` or `"triton"`.
        cu_seqlens: int32 `[documents + 1]`, the offsets of packed documents in a row with B = 1, or the `PackedRow`
            made of them, which the layers of a model can share. `packing.compressed_layout` has the layout of `k_cmp`
            and `v_cmp`; their unused slots may hold any finite number.
        scale: of the scores, by default `D ** -0.5`.
        block_ids: the blocks to attend to, `[B,S,G,n_sel]` int32 as `select_blocks` returns them; by default they are
            chosen by score. None may come after the query's own block. They are checked, and the host waits for them.
        return_lse: also return the log-sum-exps.
        max_seqlen: a bound on the tokens of a packed document, by default S. Kernels size their work by it, so a tight
            one is faster; it must hold.

    Returns:
        `[B,S,H,D]` in the dtype of `q`; with `return_lse` also the natural log-sum-exps of the compressed, selected and
        window branch, float32 `[3,B,H,S]`, −inf where a query sees no key. No gradient flows through them.
    """
    inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    layouts = check_once(check_inputs, inputs, spec)
    offsets = _offsets(cu_seqlens, q)
    if block_ids is not None:
        _check_block_ids(block_ids, q, k_sel.shape[2], spec, offsets)
    if not _use_kernels(q, backend, k_sel.shape[2]):
        lse: list[Tensor] | None = [] if return_lse else None
        out = reference.nsa_attention(*inputs, spec, offsets, scale, block_ids, lse)
        return out if lse is None else (out, torch.stack(lse).float())
    from tamis.attention import op  # here, because a machine without a GPU may lack Triton

    row = _packed(cu_seqlens, q, spec, max_seqlen)
    output = op.attention(inputs, as_numbers(spec), *row, scale, block_ids, layouts=layouts)
    return (output[0], torch.stack(output[4:7]).detach()) if return_lse else output[0]


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    spec: NSASpec,
    *,
    cu_seqlens: Tensor | PackedRow | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
    max_seqlen: int | None = None,
) -> Tensor:
    """Native Sparse Attention over one set of keys and values, with blocks compressed by their mean.

    Causal. Rotate `q` and `k` before the call if the model uses rotary positions.

    Args:
        q: queries `[B,S,H,D]`.
        k, v: keys and values `[B,S,G,D]`; each serves H / G query heads, and all three branches read them.
        gates: weights of the compressed, selected and window branches after the sigmoid, `[B,S,H,3]`.
        spec: block sizes and counts.
        cu_seqlens: int32 `[documents + 1]`, the offsets of packed documents in a row with B = 1, or their `PackedRow`;
            None: no packing.
        scale: of the scores, by default `D ** -0.5`.
        backend: `"auto"` (kernels on a GPU, else the reference), `"reference"` or `"triton"`.
        max_seqlen: a bound on the tokens of a packed document, as for `nsa_attention`.

    Returns:
        `[B,S,H,D]` in the dtype of `q`.
    """
    check_layout(q, k, v, gates)
    _offsets(cu_seqlens, q)
    row, compress = as_row(cu_seqlens, q.shape[1], spec), MeanCompression(spec)
    k_cmp, v_cmp = compress(k, row), compress(v, row)
    return nsa_attention(
        q, k_cmp, v_cmp, k, v, k, v, gates, spec, backend, cu_seqlens=row, scale=scale, max_seqlen=max_seqlen
    )


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    spec: NSASpec,
    backend: Backend = "auto",
    *,
    cu_seqlens: Tensor | PackedRow | None = None,
    scale: float | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Ids of the blocks each query and group attends to: `[B,S,G,n_sel]` int32, ascending, unused ones −1, last.

    With `cu_seqlens` the ids count from the first block of the query's document. `scale` and `max_seqlen` are those of
    `nsa_attention`.
    """
    check_branch(q, compressed_blocks(q, spec), k_cmp=k_cmp)
    offsets = _offsets(cu_seqlens, q)
    if not _use_kernels(q, backend, k_cmp.shape[2]):
        return reference.select_blocks(q, k_cmp, spec, cu_seqlens=offsets, scale=scale)
    from tamis.attention import op

    row = _packed(cu_seqlens, q, spec, max_seqlen)
    return op.select_blocks(q.detach(), k_cmp.detach(), as_numbers(spec), *row, scale)


def _offsets(cu_seqlens: Tensor | PackedRow | None, q: Tensor) -> Tensor | None:
    """The offsets of packed documents, once they are checked against the queries."""
    offsets = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, PackedRow) else cu_seqlens
    if offsets is not None:
        check_cu_seqlens(offsets, q)
    if isinstance(cu_seqlens, PackedRow) and cu_seqlens.tokens != q.shape[1]:
        raise ValueError(f"cu_seqlens was made for a row of {cu_seqlens.tokens} tokens, q has {q.shape[1]}")
    return offsets


def _check_block_ids(block_ids: Tensor, q: Tensor, groups: int, spec: NSASpec, offsets: Tensor | None) -> None:
    tokens = q.shape[1]
    check_ids(block_ids, q, groups, spec.selection_blocks(tokens), spec, "block_ids")
    row = torch.arange(tokens, device=q.device)
    positions = row if offsets is None else positions_in_documents(offsets, tokens)
    check_no_later_blocks(block_ids, positions, spec, "block_ids")


def _packed(
    cu_seqlens: Tensor | PackedRow | None, q: Tensor, spec: NSASpec, max_seqlen: int | None
) -> tuple[Tensor | None, int, int]:
    """The tables of a packed row, its number of documents and their greatest length, as an operation takes them."""
    if cu_seqlens is None:
        return None, 0, 0
    tokens = q.shape[1]
    row = cu_seqlens if isinstance(cu_seqlens, PackedRow) else PackedRow.of(cu_seqlens, tokens, spec)
    return row.flat, len(row.cu_seqlens) - 1, min(tokens, max_seqlen or tokens)


def why_no_kernels(device: torch.device | str, dtype: torch.dtype, dim: int, heads_per_group: int = 1) -> str | None:
    """Why the Triton kernels cannot run for such tensors, as the end of a sentence; None if they can."""
    device = torch.device(device)
    if not HAVE_TRITON:
        return "Triton is not installed"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take {', '.join(map(_name, KERNEL_DTYPES))}, not {_name(dtype)}"
    if dim > LARGEST_DIM or dim % DIM_STEP:
        return f"the kernels take multiples of {DIM_STEP} as head dims up to {LARGEST_DIM}, not {dim}"
    most = WIDEST_GROUP // 2 if dtype == torch.float32 and dim > LARGEST_DIM // 2 else WIDEST_GROUP
    if heads_per_group > most:  # half as many in float32 at large dims: more do not fit in shared memory
        wide = f"{heads_per_group} in {_name(dtype)} at head dim {dim}"
        return f"the kernels take up to {most} query heads per group, not {wide}"
    if device.type == "cuda":
        if capability(device) < OLDEST_GPU:
            has = _dotted(capability(device))
            return f"the kernels need capability {_dotted(OLDEST_GPU)} or newer, this GPU has {has}"
        if capability(device) in SMALL_MEMORY and dim > LARGEST_DIM // 2:
            return f"head dims above {LARGEST_DIM // 2} do not fit the shared memory of this GPU, and {dim} is one"
        return None
    if device.type != "cpu" or not _interpreting():
        return f"the tensors are on {device.type}, not on a CUDA GPU"
    return None if dtype == torch.float32 else f"Triton's interpreter is right in float32 alone, not in {_name(dtype)}"


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, asked once: it takes the host several microseconds."""
    if torch.compiler.is_compiling():  # torch.compile warns about a cache, and keeps the answer itself
        return torch.cuda.get_device_capability(device)
    return _known_capability(device)


@lru_cache
def _known_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def describe(device: torch.device | str, dtype: torch.dtype, dim: int, heads_per_group: int = 1) -> str:
    """Return one line: what computes attention for such tensors, and why."""
    device = torch.device(device)
    reason = why_no_kernels(device, dtype, dim, heads_per_group)
    if reason:
        return f"attention: reference in plain PyTorch, because {reason}"
    if device.type == "cpu":
        return "attention: Triton kernels in the interpreter, on the CPU"
    import triton

    from tamis.attention.kernels.launch import MEASURED_WITH, padded
    from tamis.attention.kernels.tuned import file_in_use

    arch, file = "".join(map(str, capability(device))), file_in_use(device, dtype, padded(dim), heads_per_group)
    tiles = f", with the tiles of {file}" if file else ""
    known, version = triton.__version__.startswith(MEASURED_WITH), triton.__version__
    other = "" if known else f"; they were measured with triton {MEASURED_WITH}x, not {version}, and may be slower"
    return f"attention: Triton kernels on {torch.cuda.get_device_name(device)} (sm_{arch}){tiles}{other}"


def _use_kernels(q: Tensor, backend: Backend, groups: int) -> bool:
    if backend == "reference":
        return False
    if backend == "auto":
        return q.is_cuda and _takes(q.device, q.dtype, q.shape[-1], q.shape[2] // groups)
    if backend != "triton":
        raise ValueError(f'backend must be "auto", "reference" or "triton", got {backend!r}')
    reason = why_no_kernels(q.device, q.dtype, q.shape[-1], q.shape[2] // groups)
    if reason:
        raise ValueError(f'backend="triton" cannot run here: {reason}; use backend="auto" or "reference"')
    return True


def _takes(device: torch.device, dtype: torch.dtype, dim: int, heads_per_group: int) -> bool:
    """Whether kernels take such tensors of a GPU; asked once, as `capability` is."""
    if torch.compiler.is_compiling():
        return why_no_kernels(device, dtype, dim, heads_per_group) is None
    return _known_to_take(device, dtype, dim, heads_per_group)


@lru_cache
def _known_to_take(device: torch.device, dtype: torch.dtype, dim: int, heads_per_group: int) -> bool:
    return why_no_kernels(device, dtype, dim, heads_per_group) is None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
