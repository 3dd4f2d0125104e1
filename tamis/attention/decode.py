"""Attention of new queries over cached keys and values: a tile of a prompt, or one token of each sequence.

Shapes: B sequences, S queries, H heads, G groups, D head dim, N compressed blocks, T tokens, W slots of the window's
ring, 2: key, then value. Queries of a tile stand at positions `start … start+S−1`; of a step, each at its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.attention import reference
from tamis.attention.checks import check_caches, check_like, check_once, check_positions, check_queries, check_start
from tamis.attention.functional import why_no_kernels
from tamis.attention.spec import NSASpec, Start, latest_start

Caches = tuple[Tensor, Tensor, Tensor]  # compressed, selected, window


def tile_attention(
    q_BSHD: Tensor,
    compressed_BN2GD: Tensor,
    selected_BT2GD: Tensor,
    window_BT2GD: Tensor,
    gates_BSH3: Tensor,
    spec: NSASpec,
    start: Start,
    first_key: int,
    kernels: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixed output `[B,S,H,D]`, and the blocks `[B,G,n]` the last query chose; the window begins at `first_key`."""
    caches = (compressed_BN2GD, selected_BT2GD, window_BT2GD)
    _check_tile(q_BSHD, caches, gates_BSH3, spec, latest_start(start), first_key)
    groups = selected_BT2GD.shape[3]
    attend = kernel_tile if use_kernels(q_BSHD, kernels, groups) else reference_tile
    out, ids_BSGn = attend(q_BSHD, caches, gates_BSH3, spec, start, first_key)
    return out, ids_BSGn[:, -1]


def kernel_tile(
    q_BSHD: Tensor, caches: Caches, gates_BSH3: Tensor, spec: NSASpec, start: Start, first_key: int
) -> tuple[Tensor, Tensor]:
    """The mixed output and every query's chosen blocks `[B,S,G,n]`, by the kernels of training; nothing is copied."""
    from tamis.attention import op  # here, because a machine without a GPU may lack Triton

    keys_and_values = [tensor for cached in caches for tensor in cached.unbind(2)]
    out, *_, ids_BSGn = op.attend(q_BSHD, keys_and_values, gates_BSH3, spec, start, first_key)
    return out, ids_BSGn


def reference_tile(
    q_BSHD: Tensor, caches: Caches, gates_BSH3: Tensor, spec: NSASpec, start: Start, first_key: int
) -> tuple[Tensor, Tensor]:
    """The same by the specification; with a start on the device, of the latest tile."""
    start = latest_start(start)
    (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win) = (cached.unbind(2) for cached in caches)
    ids_BSGn = reference.select_blocks(q_BSHD, k_cmp, spec, start)
    branches = (
        reference.compressed_attention(q_BSHD, k_cmp, v_cmp, spec, start),
        reference.selected_attention(q_BSHD, k_sel, v_sel, ids_BSGn, spec, start),
        reference.window_attention(q_BSHD, k_win, v_win, spec, start, first_key),
    )
    return reference.mix_branches(branches, gates_BSH3).to(q_BSHD.dtype), ids_BSGn


def nsa_decode(
    q_BHD: Tensor,
    compressed_BN2GD: Tensor,
    selected_BT2GD: Tensor,
    window_BW2GD: Tensor,
    gates_BH3: Tensor,
    positions_B: Tensor,
    spec: NSASpec,
    kernels: bool | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one query per sequence over caches that already hold its own key and value.

    Args:
        q_BHD: queries `[B,H,D]`, rotated to their positions.
        compressed_BN2GD: compressed keys and values `[B,N,2,G,D]`, N ≥ `spec.compressed_blocks(T)`.
        selected_BT2GD: keys and values of every token `[B,T,2,G,D]`.
        window_BW2GD: a ring of the newest ones `[B,W,2,G,D]`, W ≥ `min(spec.w, T)`: token `t` is in slot `t % W`.
        gates_BH3: gates after the sigmoid `[B,H,3]`.
        positions_B: int64 `[B]`, the position of each query, below T. The kernels do not check this.
        kernels: True or False forces the Triton kernels or the reference; None chooses by device.
        into: int32 tensors `[B,G,n_sel]` and `[B,G]` to write the chosen blocks and the keys read to.

    Returns:
        The mixed output `[B,H,D]`, the chosen blocks `[B,G,n_sel]` and the keys read `[B,G]`.
    """
    inputs = (q_BHD, compressed_BN2GD, selected_BT2GD, window_BW2GD, gates_BH3, positions_B)
    layouts = check_once(_check_step, inputs, spec)
    if use_kernels(q_BHD, kernels, selected_BT2GD.shape[3]):
        from tamis.attention.kernels.decode.step import decode

        return decode(*inputs, spec, into=into, layouts=layouts)
    outs, chosen = [], []
    for b, position in enumerate(positions_B.tolist()):
        if not 0 <= position < selected_BT2GD.shape[1]:
            raise ValueError(f"positions must lie in 0…{selected_BT2GD.shape[1] - 1}, the cache's, got {position}")
        kept = min(spec.w, position + 1)
        slots = torch.arange(position + 1 - kept, position + 1, device=q_BHD.device) % window_BW2GD.shape[1]
        caches = (
            compressed_BN2GD[b : b + 1, : spec.visible_compressed(position)],
            selected_BT2GD[b : b + 1, : position + 1],
            window_BW2GD[b : b + 1, slots],
        )
        query, gates = q_BHD[b : b + 1, None], gates_BH3[b : b + 1, None]
        out, ids = reference_tile(query, caches, gates, spec, start=position, first_key=position + 1 - kept)
        outs.append(out[:, 0])
        chosen.append(ids[:, 0])
    ids_BGn = torch.cat(chosen)
    read_BG = reads(ids_BGn, positions_B, spec)
    if into is not None:
        ids_BGn, read_BG = into[0].copy_(ids_BGn), into[1].copy_(read_BG)
    return torch.cat(outs), ids_BGn, read_BG


def reads(ids_BGn: Tensor, positions_B: Tensor, spec: NSASpec) -> Tensor:
    """`[B,G]`: keys each group reads for its token, by its index lists: compressed, tokens of chosen blocks, window."""
    seen_B1 = (positions_B + 1)[:, None]
    compressed = ((seen_B1 - spec.l) // spec.d + 1).clamp_min(0)
    first_token = ids_BGn.long() * spec.l_sel
    tokens = (seen_B1[..., None] - first_token).clamp(0, spec.l_sel).where(ids_BGn >= 0, 0)
    return (compressed + tokens.sum(dim=-1) + seen_B1.clamp_max(spec.w)).to(torch.int32)


def _check_tile(q_BSHD: Tensor, caches: Caches, gates_BSH3: Tensor, spec: NSASpec, start: int, first_key: int) -> None:
    check_queries(q_BSHD)
    check_start(start, first_key, spec.w)
    batch, end = q_BSHD.shape[0], start + q_BSHD.shape[1]
    rows = (spec.compressed_blocks(end), end, end - first_key)
    names = ("compressed", "selected", "window")
    check_caches(q_BSHD, batch, **{name: (x, n, n) for name, x, n in zip(names, caches, rows, strict=True)})
    check_like("q", q_BSHD, gates=(gates_BSH3, (*q_BSHD.shape[:3], 3)))


def _check_step(
    q_BHD: Tensor,
    compressed: Tensor,
    selected: Tensor,
    window: Tensor,
    gates_BH3: Tensor,
    positions_B: Tensor,
    spec: NSASpec,
) -> None:
    if q_BHD.dim() != 3:
        raise ValueError(f"q must have 3 dimensions [batch, heads, dim], got {list(q_BHD.shape)}")
    check_queries(q_BHD[:, None])
    tokens = selected.shape[1] if selected.dim() > 1 else 0
    check_caches(
        q_BHD,
        q_BHD.shape[0],
        compressed=(compressed, spec.compressed_blocks(tokens), None),
        selected=(selected, 1, None),
        window=(window, min(spec.w, tokens), None),
    )
    check_like("q", q_BHD, gates=(gates_BH3, (*q_BHD.shape[:2], 3)))
    check_positions(positions_B, q_BHD)


def use_kernels(q: Tensor, kernels: bool | None = None, groups: int | None = None) -> bool:
    """Kernels wherever they can run on a GPU; a caller that insists has made sure that they can.

    The heads of the queries share `groups` keys; without them, heads are treated alone and any number will do.
    """
    if kernels is not None:
        return kernels
    heads_per_group = q.shape[-2] // groups if groups else 1
    return q.is_cuda and why_no_kernels(q.device, q.dtype, q.shape[-1], heads_per_group) is None
