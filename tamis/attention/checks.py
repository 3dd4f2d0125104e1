"""What attention refuses: tensors that do not fit together. Each message names the tensor and what was expected.

Nothing here asks a GPU for a value, and so makes the host wait, except the checks of block ids. The functions of the
branches take `trusted=True` from a caller that has checked its inputs: an op that runs in every layer pays for it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tamis.attention.packing import check_offsets
from tamis.attention.spec import NSASpec

FARTHEST_HEAD = 1 << 31  # elements: kernels count heads of a token in 32 bits, positions in 64

Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
MOST_ACCEPTED = 1000  # kinds of inputs remembered
_accepted: dict[tuple[object, ...], Layouts] = {}


def check_inputs(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
) -> None:
    """The inputs of `nsa_attention`."""
    groups = check_branch(q, compressed_blocks(q, spec), k_cmp=k_cmp, v_cmp=v_cmp)
    check_branch(q, q.shape[1], groups, k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win)
    check_like("q", q, gates=(gates, (*q.shape[:3], 3)))


def layouts_of(tensors: Sequence[Tensor]) -> Layouts:
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def check_once(check: Callable[..., None], inputs: Sequence[Tensor], spec: NSASpec) -> Layouts | None:
    """Call `check(*inputs, spec)` for layouts that it has not accepted before, to save host time; return the layouts.

    Under torch.compile every call is checked, and there are none.
    """
    if torch.compiler.is_compiling():
        check(*inputs, spec)
        return None
    layouts = layouts_of(inputs)
    kinds = (check, spec, layouts)
    known = _accepted.get(kinds)
    if known is None:
        check(*inputs, spec)
        if len(_accepted) >= MOST_ACCEPTED:
            _accepted.clear()
        known = _accepted[kinds] = layouts
    return known  # always the same object, which compares faster


def check_layout(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> None:
    """Check the inputs of `nsa`; name the layout `[batch, heads, tokens, dim]` if that is what was given."""
    check_queries(q)
    swapped = (q.shape[0], q.shape[2], q.shape[1], 3)
    if gates.dim() == 4 and gates.shape != (*q.shape[:3], 3) and gates.shape == swapped:
        raise ValueError(
            f"q {list(q.shape)} has the layout [batch, heads, tokens, dim]; nsa takes [batch, tokens, heads, dim]: "
            f"call it with q.transpose(1, 2), and the same for k and v"
        )
    if k.dim() == 4 and k.shape[1] != q.shape[1] and k.shape[2] == q.shape[1]:
        raise ValueError(
            f"k {list(k.shape)} has the layout [batch, groups, tokens, dim]; nsa takes [batch, tokens, groups, dim]: "
            f"call it with k.transpose(1, 2), and the same for v"
        )
    if k.dim() == 4 and q.shape[1] != k.shape[1] and q.shape[2] == k.shape[2]:
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} have the layout [batch, heads, tokens, dim]; nsa takes "
            f"[batch, tokens, heads, dim]: call it with q.transpose(1, 2), and the same for k and v"
        )
    check_branch(q, q.shape[1], k=k, v=v)
    check_like("q", q, gates=(gates, (*q.shape[:3], 3)))


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """Offsets of packed documents; their values stay on the device and are not checked."""
    check_queries(q)
    check_offsets(cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(f"with cu_seqlens q must be one packed row [1, tokens, heads, dim], got {list(q.shape)}")
    _check_device("cu_seqlens", cu_seqlens, "q", q)


def check_branch(q: Tensor, tokens: int, groups: int | None = None, **keys_and_values: Tensor) -> int:
    """Keys and values must be `[batch, tokens, groups, dim]`, of groups that divide the query's heads; the groups."""
    check_queries(q)
    batch, _, heads, dim = q.shape
    for name, tensor in keys_and_values.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, tokens, groups, dim], got {list(tensor.shape)}")
        groups = tensor.shape[2] if groups is None else groups
        if groups < 1 or heads % groups:
            raise ValueError(f"query heads must be a multiple of key/value groups, got {heads} heads, {groups} groups")
        check_like("q", q, **{name: (tensor, (batch, tokens, groups, dim))})
    assert groups is not None
    return groups


def check_queries(q: Tensor, name: str = "q") -> None:
    """Queries, or what has their shape."""
    if q.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions [batch, tokens, heads, dim], got {list(q.shape)}")
    if not q.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {q.dtype}")
    if min(q.shape) < 1:
        raise ValueError(f"{name} [batch, tokens, heads, dim] must have no empty dimension, got {list(q.shape)}")


def compressed_blocks(q: Tensor, spec: NSASpec, start: int = 0) -> int:
    """How many compressed keys belong to queries from position `start` on."""
    check_queries(q)
    check_start(start)
    return spec.compressed_blocks(start + q.shape[1])


def check_start(start: int, first_key: int = 0, window: int = 1) -> None:
    """Queries from `start` on must find their whole window in keys from `first_key` on."""
    if start < 0:
        raise ValueError(f"start must be the position of the first query, 0 or more, got {start}")
    latest = max(0, start - window + 1)
    if not 0 <= first_key <= latest:
        raise ValueError(
            f"first_key must lie in 0…{latest}, so that the window of {window} of the query at {start} is there, "
            f"got {first_key}"
        )


def check_like(like_name: str, like: Tensor, **expected: tuple[Tensor, tuple[int, ...]]) -> None:
    """Shapes as given, dtype and device as those of `like`."""
    for name, (tensor, shape) in expected.items():
        _check_shape(name, tensor, shape)
        if tensor.dtype != like.dtype:
            raise ValueError(f"{name} must have {like_name}'s dtype {like.dtype}, got {tensor.dtype}")
        _check_device(name, tensor, like_name, like)


def check_gradients(q: Tensor, dout: Tensor, dq: Tensor, **statistics: Tensor) -> None:
    """The output's gradient, where the query's goes (like q, but of any precision), and each row's statistics."""
    check_like("q", q, dout=(dout, tuple(q.shape)))
    _check_shape("dq", dq, tuple(q.shape))
    _check_device("dq", dq, "q", q)
    if not (dq.is_floating_point() and dq.stride(-1) == 1 and dq.stride(2) * dq.shape[2] < FARTHEST_HEAD):
        raise ValueError(
            f"dq must be a floating-point tensor whose last stride is 1, and whose heads lie within {FARTHEST_HEAD:,} "
            f"elements, got {dq.dtype} with strides {dq.stride()}"
        )
    check_rows(q, **statistics)


def check_rows(q: Tensor, **statistics: Tensor) -> None:
    """One number per query and head: `[batch, heads, tokens]`, float32, contiguous."""
    batch, tokens, heads, _ = q.shape
    for name, tensor in statistics.items():
        _check_shape(name, tensor, (batch, heads, tokens))
        _check_device(name, tensor, "q", q)
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and float32, got {tensor.dtype} with strides {tensor.stride()}"
            )


def check_ids(ids: Tensor, q: Tensor, groups: int, blocks: int, spec: NSASpec, name: str = "ids") -> None:
    """Chosen blocks, `[batch, tokens, groups, n_sel]` int32: each once, ascending, then −1 for unused slots."""
    _check_shape(name, ids, (*q.shape[:2], groups, spec.n_sel))
    _check_device(name, ids, "q", q)
    if ids.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {ids.dtype}")
    if bool(((ids < -1) | (ids >= blocks)).any()):
        raise ValueError(
            f"{name} must lie in 0…{blocks - 1}, the blocks there are, or be -1 where unused, "
            f"got {int(ids.min())}…{int(ids.max())}"
        )
    before, after = ids[..., :-1], ids[..., 1:]
    if bool(((after >= 0) & ((after <= before) | (before < 0))).any()):
        raise ValueError(f"{name} must be ascending, each block once, and -1 in unused slots after them")


def check_no_later_blocks(ids: Tensor, positions_S: Tensor, spec: NSASpec, name: str) -> None:
    """No query may be given a block after its own; blocks and positions count from its document's first token."""
    if bool((ids > (positions_S // spec.l_sel)[:, None, None]).any()):
        raise ValueError(f"{name} must name no block after the query's own, counted from its document's first block")


def check_caches(q: Tensor, batch: int, **caches: tuple[Tensor, int, int | None]) -> int:
    """Cached keys and values, `[batch, rows, 2, groups, dim]`, from so many rows to so many; gives the groups."""
    heads, dim = q.shape[-2:]
    groups = 0
    for name, (tensor, least, most) in caches.items():
        if tensor.dim() != 5:
            raise ValueError(f"{name} must have 5 dimensions [batch, rows, 2, groups, dim], got {list(tensor.shape)}")
        groups = groups or tensor.shape[3]
        if groups < 1 or heads % groups:
            raise ValueError(f"query heads must be a multiple of key/value groups, got {heads} heads, {groups} groups")
        rows = tensor.shape[1]
        if rows < least or (most is not None and rows > most):
            raise ValueError(f"{name} must hold {least}{' or more' if most is None else ''} rows, got {rows}")
        check_like("q", q, **{name: (tensor, (batch, rows, 2, groups, dim))})
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have last stride 1, since it is never copied, got strides {tensor.stride()}")
    return groups


def check_positions(positions_B: Tensor, q_BHD: Tensor) -> None:
    _check_shape("positions", positions_B, (q_BHD.shape[0],))
    _check_device("positions", positions_B, "q", q_BHD)
    if positions_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions_B.dtype}")


def check_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {list(tensor.shape)}, strides {tensor.stride()}")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {tensor.device}")
