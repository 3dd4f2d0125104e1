"""How a decode step is spread over programs: splits of each branch, tiles, groups walked at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.attention.kernels.launch import Tile, cdiv, is_ampere, next_power_of_2
from tamis.attention.spec import NSASpec

FEW = 32  # (query, group) pairs: up to here latency counts, beyond it bandwidth
SCANS_OF_FEW, SCANS_OF_MANY = 256, 512  # programs of the first launch, before groups are packed
WALKERS = 128  # of chosen tokens, in the second: each repeats the choice of blocks, so one for each multiprocessor
MOST_WALKERS = 8  # of one pair
MOST_SPLITS = 64  # of one branch; merging more costs more than the shorter walk saves
LEAST_ROWS = 16  # of a product


@dataclass(frozen=True)
class Splits:
    """Over how many programs each branch of one (query, group) is spread."""

    compressed: int
    window: int
    selected: int

    @property
    def total(self) -> int:
        return self.compressed + self.window + self.selected + 1


def launches_early(q: Tensor) -> bool:
    """Whether the second kernel may start before the first has ended, and wait: from Hopper on."""
    return q.is_cuda and not is_ampere(q)


def packed_groups(sequences: int, groups: int, heads: int, dim: int) -> int:
    """How many groups of so many heads a scan walks at once: two that fit its rows, where bandwidth counts."""
    fits = groups % 2 == 0 and 2 * heads <= LEAST_ROWS and dim in (16, 32, 64)
    return 2 if fits and sequences * groups > FEW else 1


def padded_rows(heads: int) -> int:
    return max(LEAST_ROWS, next_power_of_2(heads))


def splits_for(programs: int, blocks: int, spec: NSASpec, scan: Tile, finish: Tile) -> Splits:
    """Enough splits to fill the device when there are few (query, group) pairs, one when there are many."""
    scans = max(1, min(MOST_SPLITS, (SCANS_OF_FEW if programs <= FEW else SCANS_OF_MANY) // programs))
    walkers = max(1, min(MOST_WALKERS, WALKERS // programs))
    return Splits(
        compressed=max(1, min(scans, cdiv(blocks, scan.keys))),
        window=min((walkers + 1) // 2, cdiv(spec.w, finish.keys)),
        selected=min(walkers, cdiv(spec.n_sel * spec.l_sel, finish.keys)),
    )


def tiles_for_step(padded_dim: int, q: Tensor, programs: int, pack: int = 1) -> tuple[Tile, Tile]:
    """Of the scanning and the finishing kernel; rows are those of one group's heads, whatever their number."""
    if q.dtype == torch.float32:
        return Tile(16, 32, 4, 1), Tile(16, 32, 8, 1)
    if padded_dim <= 64:
        # On an A100 three stages would spill, and so would the 128 registers that the assembler chooses by itself.
        scan = Tile(16, 32, 4, 4) if pack == 2 else Tile(16, 64, 4, 4 if programs <= FEW else 3)
        return scan, Tile(16, 128, 8, 2, registers=168) if is_ampere(q) else Tile(16, 128, 8, 3)
    keys = 64 if padded_dim <= 128 else 32
    return Tile(16, keys, 4, 3), Tile(16, keys, 8, 3)
