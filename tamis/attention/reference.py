"""Native Sparse Attention in plain PyTorch: the specification of every kernel.

Shapes: B batch, S tokens, H query heads, G key/value groups, R = H/G heads per group, D head dim,
N compressed blocks, J selection blocks. Half-precision inputs are computed in float32 and rounded once at the end.

Queries have positions `start … start+S−1`, so that the same functions serve a tile of a longer sequence whose keys are
already cached; keys begin at position 0 (the window's at `first_key`). A packed row is its documents, one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tamis.attention.packing import documents
from tamis.attention.spec import NSASpec

SCORES_AT_ONCE = 1 << 27  # attention scores held at a time; longer sequences are walked in tiles of queries
QUERIES_AT_ONCE = {"cpu": 64}  # so that a tile's scores stay in a CPU's cache; a GPU takes all it may hold


def nsa_attention(
    q_BSHD: Tensor,
    k_cmp_BNGD: Tensor,
    v_cmp_BNGD: Tensor,
    k_sel_BSGD: Tensor,
    v_sel_BSGD: Tensor,
    k_win_BSGD: Tensor,
    v_win_BSGD: Tensor,
    gates_BSH3: Tensor,
    spec: NSASpec,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    block_ids: Tensor | None = None,
    lse: list[Tensor] | None = None,
    start: int = 0,
) -> Tensor:
    """The mixed output `[B,S,H,D]`; with `cu_seqlens`, of a packed row (B = 1) as `packing` describes it.

    `block_ids` replaces the choice of `select_blocks`. The log-sum-exps of the three branches, `[B,H,S]` each, are
    appended to `lse`. Without `cu_seqlens`, queries and gates may be those of the tokens from `start` on.
    """
    if scale is not None:
        others = k_cmp_BNGD, v_cmp_BNGD, k_sel_BSGD, v_sel_BSGD, k_win_BSGD, v_win_BSGD, gates_BSH3
        scaled = nsa_attention(_scaled(q_BSHD, scale), *others, spec, cu_seqlens, None, block_ids, lse, start)
        return scaled.to(q_BSHD.dtype)
    if cu_seqlens is not None:
        outputs = []
        lses: list[list[Tensor]] = []
        for tokens, blocks in documents(cu_seqlens, q_BSHD.shape[1], spec):
            q, k_sel, v_sel, k_win, v_win, gates = (
                x[:, tokens] for x in (q_BSHD, k_sel_BSGD, v_sel_BSGD, k_win_BSGD, v_win_BSGD, gates_BSH3)
            )
            k_cmp, v_cmp = k_cmp_BNGD[:, blocks], v_cmp_BNGD[:, blocks]
            ids = None if block_ids is None else block_ids[:, tokens]
            lses.append([])
            kept = None if lse is None else lses[-1]
            inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
            outputs.append(nsa_attention(*inputs, spec, block_ids=ids, lse=kept))
        if lse is not None:
            lse += [torch.cat(branch, dim=-1) for branch in zip(*lses, strict=True)]
        return torch.cat(outputs, dim=1)
    ids = select_blocks(q_BSHD, k_cmp_BNGD, spec, start) if block_ids is None else block_ids
    branches = (
        compressed_attention(q_BSHD, k_cmp_BNGD, v_cmp_BNGD, spec, start, lse),
        selected_attention(q_BSHD, k_sel_BSGD, v_sel_BSGD, ids, spec, start, lse),
        window_attention(q_BSHD, k_win_BSGD, v_win_BSGD, spec, start, lse=lse),
    )
    return mix_branches(branches, gates_BSH3).to(q_BSHD.dtype)


def _scaled(q_BSHD: Tensor, scale: float) -> Tensor:
    """Queries whose scores at the default scale are those at `scale`."""
    return q_BSHD.to(_compute_dtype(q_BSHD)) * (scale * q_BSHD.shape[-1] ** 0.5)


def mix_branches(branches: tuple[Tensor, Tensor, Tensor], gates_BSH3: Tensor) -> Tensor:
    """`Σ gate · branch`, in the order compressed, selected, window."""
    compute = _compute_dtype(gates_BSH3)
    g_cmp, g_sel, g_win = gates_BSH3.to(compute).unsqueeze(-1).unbind(dim=3)
    compressed, selected, window = (branch.to(compute) for branch in branches)
    return g_cmp * compressed + g_sel * selected + g_win * window


def compressed_attention(
    q_BSHD: Tensor, k_BNGD: Tensor, v_BNGD: Tensor, spec: NSASpec, start: int = 0, lse: list[Tensor] | None = None
) -> Tensor:
    """Attention over the compressed blocks that end at or before the query; exactly 0 where there is none."""
    position = _positions(q_BSHD, start)
    block_end = torch.arange(k_BNGD.shape[1], device=q_BSHD.device) * spec.d + spec.l - 1

    def reach(rows: slice) -> slice:
        return slice(0, spec.compressed_blocks(start + rows.stop))

    def visible(rows: slice, keys: slice) -> Tensor:
        return (block_end[keys] <= position[rows, None])[None, None]

    return _attend(q_BSHD, k_BNGD, v_BNGD, reach, visible, lse)


def window_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    spec: NSASpec,
    start: int = 0,
    first_key: int = 0,
    lse: list[Tensor] | None = None,
) -> Tensor:
    """Attention over the `w` newest tokens, the query's own included."""
    position = _positions(q_BSHD, start)
    key = torch.arange(k_BSGD.shape[1], device=q_BSHD.device) + first_key

    def reach(rows: slice) -> slice:
        oldest, newest = start + rows.start - spec.w + 1, start + rows.stop - 1
        return slice(max(0, oldest - first_key), newest + 1 - first_key)

    def visible(rows: slice, keys: slice) -> Tensor:
        distance = position[rows, None] - key[keys]
        return ((distance >= 0) & (distance < spec.w))[None, None]

    return _attend(q_BSHD, k_BSGD, v_BSGD, reach, visible, lse)


def selected_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    ids_BSGn: Tensor,
    spec: NSASpec,
    start: int = 0,
    lse: list[Tensor] | None = None,
) -> Tensor:
    """Causal attention over the tokens of the chosen blocks; `ids` as `select_blocks` returns them."""
    position = _positions(q_BSHD, start)
    tokens = k_BSGD.shape[1]
    key = torch.arange(tokens, device=q_BSHD.device)
    ids_BGSn = ids_BSGn.transpose(1, 2).long()
    blocks = spec.selection_blocks(tokens)

    def reach(rows: slice) -> slice:
        return slice(0, start + rows.stop)

    def visible(rows: slice, keys: slice) -> Tensor:
        ids = ids_BGSn[:, :, rows]
        chosen = ids.new_zeros((*ids.shape[:3], blocks + 1), dtype=torch.bool)  # the extra column takes the unused -1
        chosen.scatter_(-1, ids.where(ids >= 0, blocks), True)
        chosen_token = chosen[..., key[keys] // spec.l_sel]
        return chosen_token & (key[keys] <= position[rows, None])

    return _attend(q_BSHD, k_BSGD, v_BSGD, reach, visible, lse)


@torch.no_grad()
def select_blocks(
    q_BSHD: Tensor,
    k_cmp_BNGD: Tensor,
    spec: NSASpec,
    start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Ids of the blocks each query and group attends to: `[B,S,G,n_sel]` int32, ascending, then −1 for unused ones.

    The ids of a packed row count from the first block of the query's document.
    """
    if scale is not None:
        return select_blocks(_scaled(q_BSHD, scale), k_cmp_BNGD, spec, start, cu_seqlens)
    if cu_seqlens is not None:
        each = documents(cu_seqlens, q_BSHD.shape[1], spec)
        chosen = [select_blocks(q_BSHD[:, tokens], k_cmp_BNGD[:, blocks], spec) for tokens, blocks in each]
        return torch.cat(chosen, dim=1)
    tiles = _tiles(q_BSHD, k_cmp_BNGD)
    return torch.cat([_top_blocks(q_BSHD[:, rows], k_cmp_BNGD, spec, start + rows.start) for rows in tiles], dim=1)


def _top_blocks(q_BSHD: Tensor, k_cmp_BNGD: Tensor, spec: NSASpec, start: int) -> Tensor:
    position = _positions(q_BSHD, start)
    scores_BGSJ = block_scores(q_BSHD, k_cmp_BNGD, spec, start)
    block = torch.arange(scores_BGSJ.shape[-1], device=q_BSHD.device)
    newest = position[:, None] // spec.l_sel
    forced = (block == 0) | (block == newest) | (block == newest - 1)
    ranked = scores_BGSJ.masked_fill(forced, float("inf")).masked_fill(block > newest, -1.0)
    # A stable sort gives ties to the lower index; topk gives them no order.
    best, ids = torch.sort(ranked, dim=-1, descending=True, stable=True)
    best, ids = best[..., : spec.n_sel], ids[..., : spec.n_sel]
    unused = torch.iinfo(torch.int32).max
    ids = ids.masked_fill(best < 0, unused).sort(dim=-1).values
    ids = torch.nn.functional.pad(ids, (0, spec.n_sel - ids.shape[-1]), value=unused)
    return ids.masked_fill(ids == unused, -1).to(torch.int32).transpose(1, 2).contiguous()


def block_scores(q_BSHD: Tensor, k_cmp_BNGD: Tensor, spec: NSASpec, start: int = 0) -> Tensor:
    """Score `[B,G,S,J]` of every selection block: the compressed branch's probabilities, shared out by overlap."""
    position = _positions(q_BSHD, start)
    end = start + q_BSHD.shape[1]
    k_cmp_BNGD = k_cmp_BNGD[:, : spec.compressed_blocks(end)]  # later ones none of these queries may see
    blocks, columns = k_cmp_BNGD.shape[1], spec.selection_blocks(end)
    batch, tokens, _, _ = q_BSHD.shape
    groups = k_cmp_BNGD.shape[2]
    if blocks == 0:
        return torch.zeros(batch, groups, tokens, columns, dtype=_compute_dtype(q_BSHD), device=q_BSHD.device)
    block_end = torch.arange(blocks, device=q_BSHD.device) * spec.d + spec.l - 1
    visible = (block_end <= position[:, None])[None, None, None]
    p_BGRSN = _softmax(_scores(q_BSHD, k_cmp_BNGD), visible)
    return p_BGRSN.sum(dim=2) @ overlap_matrix(blocks, columns, spec, p_BGRSN)


def overlap_matrix(blocks: int, columns: int, spec: NSASpec, like: Tensor) -> Tensor:
    """`[N,J]`: how many stride-d pieces of compressed block `i` lie in selection block `j`."""
    i = torch.arange(blocks, device=like.device)[:, None] + torch.arange(spec.pieces_per_compressed, device=like.device)
    matrix = torch.zeros(blocks, columns, dtype=like.dtype, device=like.device)
    return matrix.scatter_add_(1, i // spec.pieces_per_selected, torch.ones_like(i, dtype=like.dtype))


def _attend(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    reach: Callable[[slice], slice],
    visible: Callable[[slice, slice], Tensor],
    lse: list[Tensor] | None = None,
) -> Tensor:
    """Softmax attention by tiles of queries.

    `reach` gives the range of keys that some query of a tile may see, `visible` the mask `[B|1, G|1, rows, keys]`.
    """
    outputs, lses = [], []
    for rows in _tiles(q_BSHD, k_BTGD):
        keys = reach(rows)
        seen = visible(rows, keys)
        outputs.append(_attend_tile(q_BSHD[:, rows], k_BTGD[:, keys], v_BTGD[:, keys], seen))
        if lse is not None:
            lses.append(_log_sum_exp(q_BSHD[:, rows], k_BTGD[:, keys], seen))
    if lse is not None:
        lse.append(torch.cat(lses, dim=-1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).to(q_BSHD.dtype)


def _attend_tile(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, visible_BGST: Tensor) -> Tensor:
    p_BGRST = _softmax(_scores(q_BSHD, k_BTGD), visible_BGST.unsqueeze(2))
    v_BGTD = v_BTGD.to(p_BGRST.dtype).transpose(1, 2)
    out_BGRSD = (p_BGRST.flatten(2, 3) @ v_BGTD).unflatten(2, p_BGRST.shape[2:4])
    return out_BGRSD.permute(0, 3, 1, 2, 4).flatten(2, 3)


@torch.no_grad()
def _log_sum_exp(q_BSHD: Tensor, k_BTGD: Tensor, visible_BGST: Tensor) -> Tensor:
    """Natural log-sum-exp `[B,H,S]` of the visible scores; −inf for a row that sees none."""
    scores = _scores(q_BSHD, k_BTGD).masked_fill(~visible_BGST.unsqueeze(2), float("-inf"))
    return torch.logsumexp(scores, dim=-1).flatten(1, 2)


def _scores(q_BSHD: Tensor, k_BTGD: Tensor) -> Tensor:
    """Scaled dot products `[B,G,R,S,T]`; head `h` belongs to group `h // R`."""
    compute = _compute_dtype(q_BSHD)
    q_BGRSD = q_BSHD.to(compute).unflatten(2, (k_BTGD.shape[2], -1)).permute(0, 2, 3, 1, 4) * q_BSHD.shape[-1] ** -0.5
    k_BGDT = k_BTGD.to(compute).permute(0, 2, 3, 1)
    # The heads of a group as more rows of one product: its keys are not copied for each of them.
    return (q_BGRSD.flatten(2, 3) @ k_BGDT).unflatten(2, q_BGRSD.shape[2:4])


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys; a row that sees none gives zeros, not NaN."""
    p = torch.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), dim=-1)
    return p * visible


def _tiles(q_BSHD: Tensor, k_BTGD: Tensor) -> list[slice]:
    batch, tokens, heads, _ = q_BSHD.shape
    rows = max(1, SCORES_AT_ONCE // max(1, batch * heads * k_BTGD.shape[1]))
    rows = min(rows, QUERIES_AT_ONCE.get(q_BSHD.device.type, rows))
    return [slice(i, min(i + rows, tokens)) for i in range(0, tokens, rows)]


def _positions(q_BSHD: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + q_BSHD.shape[1], device=q_BSHD.device)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
