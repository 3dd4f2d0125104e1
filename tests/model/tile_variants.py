"""Name, without a GPU and without compiling, the kernels that each tile of a long prompt would compile anew.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.model.tile_variants`; prints JSON.
"""

from __future__ import annotations

import json

import torch
import triton
from triton import knobs

from tamis.attention.decode import kernel_tile
from tamis.attention.kernels.start import DeviceStart
from tamis.config import load_config
from tamis.model.cache import NSACache
from tamis.model.layers import Rotary
from tamis.model.nsa import NSALayer
from tamis.model.ops.cache_writes import remember_tile
from tests.attention.ahead_of_time import TargetDriver

TILE, TILES, SPARE = 4096, 16, 32


def main() -> None:
    triton.runtime.driver.set_active(TargetDriver(90))
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn, **rest: object) -> bool:  # type: ignore[no-untyped-def]
        seen.add((fn.name, key))
        return True  # neither compiled nor launched

    knobs.runtime.jit_cache_hook = note
    config = load_config(None, ["model.n_layers=1"])
    capacity = TILE * TILES + SPARE
    layer = NSALayer(config, Rotary(config.model.d_k, 1e4, 1.0, capacity)).to(torch.bfloat16).requires_grad_(False)
    cache = NSACache(config, 1, capacity, torch.bfloat16, torch.device("cpu"))
    anew, where = [], torch.zeros(1, dtype=torch.int64)
    for start in range(0, TILE * TILES, TILE):
        before = set(seen)
        read_tile(layer, cache, DeviceStart(capacity - TILE, where) if start else 0)
        anew.append(sorted(name for name, _ in seen - before))
    print(json.dumps(anew))


def read_tile(layer: NSALayer, cache: NSACache, start: int) -> None:
    """What the layer launches for a tile, at the M7C shape."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(1, TILE, *shape, dtype=torch.bfloat16)

    q, window = remember_tile(layer, empty(layer.heads + 6 * layer.groups, layer.dim), cache, start)
    end = start + TILE
    kept = cache.compressed_BN2GD[:, : layer.spec.compressed_blocks(end)], cache.selected_BT2GD[:, :end], window
    kernel_tile(q, kept, empty(layer.heads, 3), layer.spec, start, end - window.shape[1])


if __name__ == "__main__":
    main()
