"""Proof on the present device that attention over the caches agrees with the specification: steps, and tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tamis.attention.decode import decode_attention, tile_attention, use_kernels
from tamis.attention.spec import DeviceStart, NSASpec
from tamis.attention.verify import LIMIT, Check, relative_rmse

TILE = 29  # queries of a tile that is checked
MANY = 36  # sequences: their kernels have tiles of their own
LONG = 5  # times n_sel blocks: here the selected branch no longer takes the form of short sequences alone


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
    """Compare steps at early, middle and late positions, a short and a long tile, with the reference at this shape."""
    tokens = (spec.n_sel + 5) * spec.l_sel + 5
    positions = torch.tensor([tokens - 1, tokens // 2, spec.l - 1, 0], device=device)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    blocks = spec.compressed_blocks(tokens)
    kept = [normal(len(positions), n, 2, groups, dim) for n in (blocks + 1, tokens, spec.w)]
    q, gates = normal(len(positions), heads, dim), torch.sigmoid(normal(len(positions), heads, 3))
    step: tuple[Any, ...] = (q, *kept, gates, positions, spec)
    attend: Callable[..., Any] = decode_attention
    got, _, reads = attend(*step, kernels=kernels)
    again = attend(*step, kernels=kernels)[0]
    want, _, expected_reads = attend(*_exact(step), kernels=False)
    many = (x.repeat(MANY // len(positions), *[1] * (x.dim() - 1)) for x in (q, *kept, gates, positions))
    of_many = attend(*many, spec, kernels=kernels)[0]
    return [
        Check("decode out", relative_rmse(got, want), LIMIT[dtype]),
        Check("decode of many out", relative_rmse(of_many, want.repeat(MANY // len(positions), 1, 1)), LIMIT[dtype]),
        Check("decode reads differ", float((reads != expected_reads).sum()), 0.0),
        Check("decode bits differ", float((got != again).sum()), 0.0),
        *(
            Check(name, _tile_error(normal, heads, groups, dim, spec, end, on_device, kernels), LIMIT[dtype])
            for name, end, on_device in (
                ("tile out", tokens, False),
                ("long tile out", LONG * spec.n_sel * spec.l_sel + 5, use_kernels(q, kernels)),
            )
        ),
    ]


def _tile_error(
    normal: Callable[..., Tensor],
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    end: int,
    on_device: bool,
    kernels: bool | None,
) -> float:
    """Relative RMSE of the newest TILE queries of `end` tokens; `on_device`: where kernels find their position."""
    start = max(1, end - TILE)
    first_key = max(0, start - spec.w + 1)
    caches = [normal(1, n, 2, groups, dim) for n in (spec.compressed_blocks(end), end, end - first_key)]
    q, gates = normal(1, end - start, heads, dim), torch.sigmoid(normal(1, end - start, heads, 3))
    tile: tuple[Any, ...] = (q, *caches, gates, spec)
    begin = DeviceStart(start, torch.tensor([start], device=q.device)) if on_device else start
    attend: Callable[..., Any] = tile_attention
    got = attend(*tile, begin, first_key, kernels=kernels)[0]
    return relative_rmse(got, attend(*_exact(tile), start, first_key, kernels=False)[0])


def _exact(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same rounded numbers in float32: the reference's own rounding is not what is measured."""
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


@cache
def require_decode(device: torch.device, dtype: torch.dtype, heads: int, groups: int, dim: int, spec: NSASpec) -> None:
    """Refuse a device whose kernels disagree with the specification; once for each shape."""
    failed = [check for check in verify_decode(device, dtype, heads, groups, dim, spec) if not check.passed]
    if failed:
        found = "; ".join(map(str, failed))
        raise RuntimeError(f"attention over the caches is wrong on {device}: {found}; use --device cpu and report it")
