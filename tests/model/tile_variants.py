"""List the kernels that each tile of a long prompt would compile, without a GPU and without compiling them.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.model.tile_variants`; prints JSON.
"""

from __future__ import annotations

import json

import torch

from tamis.attention import NSASpec
from tamis.attention.cache import NSACache
from tamis.attention.decode import kernel_tile
from tamis.attention.kernels.ahead_of_time import stop_after_compiling
from tamis.attention.kernels.cache_writes import write_tile
from tamis.attention.kernels.tuned import GpuModel
from tamis.attention.layer import NSAAttention
from tamis.attention.spec import DeviceStart, Start, latest_start

TILE, TILES, SPARE = 4096, 16, 32


def main() -> None:
    seen: set[str] = set()

    def note(key: str) -> bool:
        seen.add(key)
        return False  # not compiled

    stop_after_compiling(GpuModel("", (9, 0)), note)
    capacity = TILE * TILES + SPARE
    layer = NSAAttention(768, 12, 2, 64, NSASpec(), max_len=capacity).to(torch.bfloat16).requires_grad_(False)
    cache = layer.layer_cache(1, capacity)
    compiled, where = [], torch.zeros(1, dtype=torch.int64)
    for start in range(0, TILE * TILES, TILE):
        before = set(seen)
        read_tile(layer, cache, DeviceStart(capacity - TILE, where) if start else 0)
        compiled.append(sorted(key.split()[0] for key in seen - before))
    print(json.dumps(compiled))


def read_tile(layer: NSAAttention, cache: NSACache, start: Start) -> None:
    """Launch the kernels of one tile at the M7C shape."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(1, TILE, *shape, dtype=torch.bfloat16)

    q, window = write_tile(layer, empty(layer.heads + 6 * layer.groups, layer.dim), cache, start)
    end = latest_start(start) + TILE
    kept = cache.compressed_BN2GD[:, : layer.spec.compressed_blocks(end)], cache.selected_BT2GD[:, :end], window
    kernel_tile(q, kept, empty(layer.heads, 3), layer.spec, start, end - window.shape[1])


if __name__ == "__main__":
    main()
