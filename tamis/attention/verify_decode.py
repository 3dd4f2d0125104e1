"""Proof on the present device that attention over the caches is what the specification says: steps, and a tile."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tamis.attention.decode import decode_attention, reference_tile, tile_attention
from tamis.attention.spec import NSASpec
from tamis.attention.verify import LIMIT, Check, relative_rmse

TILE = 3  # queries of the tile that is checked


def verify_decode(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    kernels: bool | None = None,
    seed: int = 0,
) -> list[Check]:
    """Compare steps at early, middle and late positions, and a tile at the end, with the reference at this shape."""
    tokens = (spec.n_sel + 5) * spec.l_sel + 5
    positions = torch.tensor([tokens - 1, tokens // 2, spec.l - 1, 0], device=device)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    blocks = spec.compressed_blocks(tokens)
    compressed, selected = (normal(len(positions), n, 2, groups, dim) for n in (blocks + 1, tokens))
    ring, linear = (normal(len(positions), n, 2, groups, dim) for n in (spec.w, spec.w - 1 + TILE))
    q, gates = normal(len(positions), TILE, heads, dim), torch.sigmoid(normal(len(positions), TILE, heads, 3))
    step = (q[:, 0], compressed, selected, ring, gates[:, 0], positions, spec)
    start = tokens - TILE
    tile = (q, compressed[:, :blocks], selected, linear, gates, spec, start, start - spec.w + 1)
    got, _, reads = decode_attention(*step, kernels=kernels)
    again = decode_attention(*step, kernels=kernels)[0]
    want, _, expected_reads = decode_attention(*_exact(step), kernels=False)  # type: ignore[misc]
    return [
        Check("decode out", relative_rmse(got, want), LIMIT[dtype]),
        Check("decode reads differ", float((reads != expected_reads).sum()), 0.0),
        Check("decode bits differ", float((got != again).sum()), 0.0),
        Check(
            "tile out",
            relative_rmse(tile_attention(*tile, kernels=kernels)[0], reference_tile(*_exact(tile))[0]),
            LIMIT[dtype],
        ),
    ]


def _exact(arguments: tuple) -> tuple:  # type: ignore[type-arg]
    """The same rounded numbers in float32: the reference's own rounding is not what is measured."""
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


@cache
def require_decode(device: torch.device, dtype: torch.dtype, heads: int, groups: int, dim: int, spec: NSASpec) -> None:
    """Refuse a device whose kernels disagree with the specification; once for each shape."""
    failed = [check for check in verify_decode(device, dtype, heads, groups, dim, spec) if not check.passed]
    if failed:
        found = "; ".join(map(str, failed))
        raise RuntimeError(f"attention over the caches is wrong on {device}: {found}; use --device cpu and report it")
