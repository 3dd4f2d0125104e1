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
    from tamis.attention.kernels.selected.union import tokens_of_tile  # here, because it imports Triton

    with torch.no_grad():
        ids = select_blocks(inputs[0], inputs[1], spec)
    return count_blocks(ids, spec, tokens_of_tile(inputs[0], inputs[3], inputs[4], spec))


def count_blocks(ids_BSGn: Tensor, spec: NSASpec, tile: int) -> dict[str, float]:
    """The same, from the block ids, for tiles of `tile` tokens."""
    # Here, because they import Triton.
    from tamis.attention.kernels.selected.pairs import DENSE_UP_TO
    from tamis.attention.kernels.selected.union import WORTHWHILE

    batch, tokens, groups, slots = ids_BSGn.shape
    blocks = spec.selection_blocks(tokens)
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
