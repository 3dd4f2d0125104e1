"""How alike neighbouring queries choose: what the unions of the selected branch hold, counted in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.attention import NSASpec, select_blocks


def count_choices(inputs: list[Tensor], spec: NSASpec) -> dict[str, float]:
    """Count the blocks of what attention chooses for these inputs, the tensor arguments of `nsa_attention`.

    Returns the mean number of blocks that a query chooses, that all queries of a tile choose together, and the share
    of tiles that walk such a union instead of lists of pairs.
    """
    with torch.no_grad():
        ids = select_blocks(inputs[0], inputs[1], spec)
    return count_blocks(ids, spec, heads_per_group=inputs[0].shape[2] // inputs[3].shape[2])


def count_blocks(ids_BSGn: Tensor, spec: NSASpec, heads_per_group: int) -> dict[str, float]:
    """The same, from the block ids; tiles are those of the kernel for Hopper at head dim 64."""
    # Here, because they import Triton.
    from tamis.attention.kernels.selected.pairs import DENSE_UP_TO
    from tamis.attention.kernels.selected.union import MOST_TOKENS, ROWS_IN_GLUON, WORTHWHILE

    batch, tokens, groups, slots = ids_BSGn.shape
    blocks, tile = spec.selection_blocks(tokens), min(ROWS_IN_GLUON // heads_per_group, MOST_TOKENS)
    tiles = -(-tokens // tile)
    missing = ids_BSGn.new_full((batch, tiles * tile - tokens, groups, slots), -1)
    of_tile = torch.cat((ids_BSGn, missing), dim=1).view(batch, tiles, tile, groups, slots)
    of_tile = of_tile.transpose(2, 3).flatten(3).long()
    marks = torch.zeros(*of_tile.shape[:3], blocks + 1, dtype=torch.bool, device=ids_BSGn.device)
    marks.scatter_(3, torch.where(of_tile < 0, blocks, of_tile), True)
    union, chosen = marks[..., :blocks].sum(dim=3), (of_tile >= 0).sum(dim=3)
    here = torch.full((tiles, 1), tile, device=ids_BSGn.device)
    here[-1] = tokens - (tiles - 1) * tile
    walked = (union * here <= WORTHWHILE * chosen).float().mean().item()
    return {
        "chosen_blocks": round((ids_BSGn >= 0).sum(dim=3).float().mean().item(), 2),
        "union_blocks": round(union.float().mean().item(), 2),
        "union_tiles": round(walked if blocks > DENSE_UP_TO * slots else 1.0, 3),
    }
