"""List the kernels that each tile of a long prompt would compile, without a GPU and without compiling them.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.model.tile_variants`; prints JSON.
"""

from __future__ import annotations

import json

import torch
import triton
from triton import knobs

from tamis.attention import NSASpec
from tamis.attention.cache import NSACache
from tamis.attention.decode import kernel_tile
from tamis.attention.kernels.cache_writes import write_tile
from tamis.attention.layer import NSAAttention
from tamis.attention.spec import DeviceStart, Start, latest_start
from tests.attention.ahead_of_time import TargetDriver

TILE, TILES, SPARE = 4096, 16, 32


def main() -> None:
    triton.runtime.driver.set_active(TargetDriver(90))
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn, **rest: object) -> bool:  # type: ignore[no-untyped-def]
        seen.add((fn.name, key))
        return True  # neither compiled nor launched

    knobs.runtime.jit_cache_hook = note
    capacity = TILE * TILES + SPARE
    layer = NSAAttention(768, 12, 2, 64, NSASpec(), max_len=capacity).to(torch.bfloat16).requires_grad_(False)
    cache = layer.layer_cache(1, capacity)
    compiled, where = [], torch.zeros(1, dtype=torch.int64)
    for start in range(0, TILE * TILES, TILE):
        before = set(seen)
        read_tile(layer, cache, DeviceStart(capacity - TILE, where) if start else 0)
        compiled.append(sorted(name for name, _ in seen - before))
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
