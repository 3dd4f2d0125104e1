"""A tile of queries over cached keys: the kernels of training, started at any position, give what one pass gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.devices import (  # isort: skip
    DEVICE,
    DTYPES,
    LIMIT,
    assert_chosen_alike,
    poisoned_memory,
    random_inputs,
    relative_rmse,
)
from tamis.attention import NSASpec, op
from tamis.attention.decode import Caches, kernel_tile, reference_tile, tile_attention
from tamis.attention.spec import DeviceStart

__all__ = ["poisoned_memory"]

# The second and third have more than four times as many blocks as a query chooses: both forms of the selected branch.
SPECS = [NSASpec(8, 4, 8, 4, 24), NSASpec(4, 2, 4, 3, 7), NSASpec(6, 3, 3, 4, 40), NSASpec(8, 8, 16, 3, 1)]
ROOM = 9  # tokens the caches could hold beyond those read: tiles must go by strides, not by sizes


def cached(k: Tensor, v: Tensor) -> Tensor:
    """`[B,T,2,G,D]` as a layer keeps it: a slice of a larger tensor whose spare rows are poison."""
    pair = torch.stack((k, v), dim=2)
    kept = torch.full(
        (pair.shape[0], pair.shape[1] + ROOM, *pair.shape[2:]), float("nan"), dtype=k.dtype, device=DEVICE
    )
    kept[:, : pair.shape[1]] = pair
    return kept


def caches_at(inputs: list[Tensor], spec: NSASpec, start: int, end: int) -> tuple[Caches, int]:
    """What a layer hands over for tokens `start … end−1`: views of its caches, the window from its first key on."""
    _, *keys_and_values, _ = inputs
    compressed, selected, window = (cached(*keys_and_values[i : i + 2]) for i in (0, 2, 4))
    first_key = max(0, start - spec.w + 1)
    views = (compressed[:, : spec.compressed_blocks(end)], selected[:, :end], window[:, first_key:end])
    return views, first_key


def by_tiles(inputs: list[Tensor], spec: NSASpec, bounds: list[int], attend=kernel_tile) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    outs, ids = [], []
    for start, end in zip([0, *bounds], [*bounds, inputs[0].shape[1]], strict=True):
        caches, first_key = caches_at(inputs, spec, start, end)
        out, chosen = attend(inputs[0][:, start:end], caches, inputs[-1][:, start:end], spec, start, first_key)
        outs.append(out)
        ids.append(chosen)
    return torch.cat(outs, dim=1), torch.cat(ids, dim=1)


def inputs_of(spec: NSASpec, tokens: int, dtype: torch.dtype = torch.float32, **shape: int) -> list[Tensor]:
    return [x.detach() for x in random_inputs(spec, tokens=tokens, dtype=dtype, **shape)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spec", "bounds"),
    [
        (SPECS[0], [1, 38]),
        (SPECS[0], [61]),
        (SPECS[1], [7, 31]),
        (SPECS[1], [52]),
        (SPECS[2], [29, 30]),
        (SPECS[3], [45]),
    ],
    ids=lambda x: str(x) if isinstance(x, list) else f"l_sel{x.l_sel}",
)
def test_tiles_of_any_size_give_what_one_pass_gives(poisoned_memory, spec, bounds, dtype) -> None:  # type: ignore[no-untyped-def]
    inputs = inputs_of(spec, 62, dtype, groups=1)
    q, *keys_and_values, gates = inputs
    one_pass, *_, one_ids = op.attend(q, keys_and_values, gates, spec)
    out, ids = by_tiles(inputs, spec, bounds)
    expected, _ = by_tiles([x.float() for x in inputs], spec, bounds, attend=reference_tile)
    assert relative_rmse(out, one_pass.float()) <= LIMIT[dtype]
    assert relative_rmse(out, expected) <= LIMIT[dtype]
    assert_chosen_alike(ids, one_ids, q, keys_and_values[0], spec)


@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 2, "groups": 1, "heads_per_group": 6},
        {"groups": 2, "heads_per_group": 1, "dim": 24},
        {"groups": 1, "heads_per_group": 16},
    ],
    ids=["group of 6, batch of 2", "one head, dim padded", "group of 16"],
)
def test_any_group_batch_and_dim(poisoned_memory, shape) -> None:  # type: ignore[no-untyped-def]
    spec = SPECS[1]
    inputs = inputs_of(spec, 63, **shape)
    (out, ids), (expected, wanted) = (by_tiles(inputs, spec, [43], attend) for attend in (kernel_tile, reference_tile))
    assert relative_rmse(out, expected) <= LIMIT[torch.float32]
    assert_chosen_alike(ids, wanted, *inputs[:2], spec)


def test_a_tile_is_scored_and_listed_in_chunks_like_a_whole_sequence(poisoned_memory, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    spec = SPECS[1]
    inputs = inputs_of(spec, 200, groups=1, heads_per_group=1)
    whole = by_tiles(inputs, spec, [41])
    monkeypatch.setattr("tamis.attention.kernels.selection.SCORE_BYTES", 4 * 128 * 50)
    monkeypatch.setattr("tamis.attention.kernels.selected.layout.LARGE", 256)  # segments of 64 queries
    monkeypatch.setattr("tamis.attention.kernels.selected.union.WORTHWHILE", 0.5)  # no union is short enough
    for got, want in zip(by_tiles(inputs, spec, [41]), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS[:3])
def test_a_position_on_the_device_gives_what_its_number_gives(spec: NSASpec) -> None:
    """Caches with unused capacity are passed whole, since only the device holds the position where the tile ends."""
    start, end, room = 60, 99, 140
    inputs = inputs_of(spec, room)
    views, first_key = caches_at(inputs, spec, start, end)
    q, gates = inputs[0][:, start:end], inputs[-1][:, start:end]
    expected, wanted = kernel_tile(q, views, gates, spec, start, first_key)
    latest = room - (end - start)
    compressed, selected = (torch.stack(inputs[i : i + 2], dim=2) for i in (1, 3))
    where = DeviceStart(latest, torch.tensor([start], device=DEVICE))
    relative = latest - (start - first_key)  # the window's keys begin as far before the tile as they did
    out, ids = kernel_tile(q, (compressed, selected, views[2]), gates, spec, where, relative)
    assert_chosen_alike(ids, wanted, q, inputs[1], spec, start)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite_and_right(poisoned_memory) -> None:  # type: ignore[no-untyped-def]
    inputs = inputs_of(SPECS[0], 45, scale=30)
    (out, _), (expected, _) = (by_tiles(inputs, SPECS[0], [31], attend) for attend in (kernel_tile, reference_tile))
    assert relative_rmse(out, expected) <= LIMIT[torch.float32]


def test_the_caches_are_read_where_they_lie(poisoned_memory) -> None:  # type: ignore[no-untyped-def]
    """A copy of the cache for each tile would cost more than the tile: every kernel must get a view."""
    inputs = inputs_of(SPECS[1], 60, groups=1)
    caches, first_key = caches_at(inputs, SPECS[1], 50, 60)
    seen = {cache.untyped_storage().data_ptr() for cache in caches}
    handed_over: set[int] = set()
    original = op.compressed_forward, op.selected_forward, op.window_forward

    def recorded(function):  # type: ignore[no-untyped-def]
        def call(q, k, v, *rest, **options):  # type: ignore[no-untyped-def]
            handed_over.update(x.untyped_storage().data_ptr() for x in (k, v))
            return function(q, k, v, *rest, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, function in zip(("compressed", "selected", "window"), original, strict=True):
            patch.setattr(op, f"{name}_forward", recorded(function))
        copies = torch.Tensor.contiguous
        patch.setattr(torch.Tensor, "contiguous", lambda x: copies(x) if x.shape[1] == 10 else pytest.fail("a copy"))
        tile_attention(inputs[0][:, 50:], *caches, inputs[-1][:, 50:], SPECS[1], 50, first_key, kernels=True)
    assert handed_over == seen
