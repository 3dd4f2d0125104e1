"""Selection health: which blocks the queries of each NSA layer choose, measured on one sequence now and then.

Block 0 and the two newest blocks are always taken, so only the other choices are counted. Each figure separates a layer
that has learned to choose from one that chooses at random, and from one that always chooses the same blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.model.decoder import Decoder

QUERIES = 256  # sampled from the second half of the sequence, each with its neighbour
SELECTION_STATISTICS = ("distinct", "distance", "likeness")


@torch.no_grad()
def selection_statistics(decoder: Decoder, tokens_1S: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return SELECTION_STATISTICS per NSA layer, `[layers, 3]` on the device; NaN where a layer has no choice.

    The parameters must be whole. Of packed documents the longest is measured, whose offsets the host reads.
    """
    row, document = decoder.packed_row(cu_seqlens, tokens_1S.shape[1]), slice(None)
    if cu_seqlens is not None:
        longest = int(cu_seqlens.diff().argmax())
        document = slice(int(cu_seqlens[longest]), int(cu_seqlens[longest + 1]))
    found = [
        choice_statistics(layer.selected_blocks(normed, row)[:, document], layer.spec)
        for layer, normed in decoder.nsa_layers(tokens_1S, row)
    ]
    return torch.stack(found)


def choice_statistics(ids_BSGn: Tensor, spec: NSASpec) -> Tensor:
    """Return three figures for the chosen block ids of a layer, without a host sync.

    - distinct: share of the older blocks that at least one sampled query chose. Low: all queries choose the same few.
    - distance: how far back the choices lie, from 0 (newest) to 1 (oldest). About 0.5 at random.
    - likeness: how much more neighbouring queries agree than at random. 0: as at random, 1: the same choices.
    """
    tokens = ids_BSGn.shape[1]
    queries = torch.linspace(tokens // 2, max(tokens - 2, 0), min(QUERIES, tokens // 2)).long()
    queries = queries[(queries + 1) // spec.l_sel == queries // spec.l_sel]  # neighbours with the same blocks to choose
    older = int(queries[0]) // spec.l_sel - 2 if len(queries) else 0  # blocks that every sampled query could choose
    if older < 1:
        return ids_BSGn.new_full((3,), torch.nan, dtype=torch.float32)
    queries = queries.to(ids_BSGn.device, non_blocking=True)
    newest_Q = queries // spec.l_sel
    free_Q1 = (newest_Q - 2)[:, None]  # blocks 1 … newest - 2
    blocks = spec.selection_blocks(tokens)
    chosen, neighbours = (_chosen_by_score(ids_BSGn[:, queries + offset], newest_Q, blocks) for offset in (0, 1))
    count_BQG = chosen.sum(-1).float()
    numbers = torch.arange(blocks, device=ids_BSGn.device)
    back_QN = 1 - (numbers - 1) / (free_Q1 - 1).clamp_min(1)
    distance = (chosen * back_QN[:, None]).sum(-1) / count_BQG
    random = count_BQG / free_Q1
    likeness = ((chosen & neighbours).sum(-1) / count_BQG - random) / (1 - random)
    has_choice = (count_BQG > 0) & (count_BQG < free_Q1)
    distinct = chosen[..., 1 : older + 1].any(1).float().mean(-1, keepdim=True).transpose(1, 2)  # [B,1,G]
    figures = torch.stack([distinct.expand_as(count_BQG), distance, likeness])
    return torch.where(has_choice, figures, torch.nan).flatten(1).nanmean(dim=1)


def _chosen_by_score(ids_BQGn: Tensor, newest_Q: Tensor, blocks: int) -> Tensor:
    """Return which blocks were chosen by score, `[B,Q,G,blocks]`: not block 0, not the two newest, not unused ids."""
    is_forced = (ids_BQGn <= 0) | (ids_BQGn >= newest_Q[:, None, None] - 1)
    mask = torch.zeros(*ids_BQGn.shape[:3], blocks + 1, dtype=torch.bool, device=ids_BQGn.device)
    return mask.scatter_(-1, torch.where(is_forced, blocks, ids_BQGn).long(), True)[..., :blocks]
