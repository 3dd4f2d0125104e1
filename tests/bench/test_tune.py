"""`tamis tune`: which candidates win, which are skipped, and which kernels are timed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tamis.attention import NSASpec
from tamis.attention.kernels.tiles import AnyTile, RowTile, Tile, candidates
from tamis.attention.kernels.tuned import GpuModel, chosen_tile, using
from tamis.bench import tune as tune_module
from tamis.bench.tune import KernelCall, TuneShape, agrees, kernel_calls, launch_candidates, measure_tiles, tune_kernel

H200 = GpuModel("NVIDIA H200", (9, 0))
M7C = TuneShape(12, 2, 64, torch.bfloat16, NSASpec(), 8192)
SHIPPED, *OTHERS = candidates("forward", "hopper", torch.bfloat16, 64)


def tune(times: dict[AnyTile, float], results: dict[AnyTile, Tensor | Exception] | None = None) -> tuple:
    """Tune a kernel that takes `times`, by default 5 ms, and computes ones unless told otherwise in `results`."""

    def tile() -> AnyTile:
        return chosen_tile("forward", torch.device("cpu"), torch.bfloat16, 64, 6)

    def call() -> list[Tensor]:
        result = (results or {}).get(tile(), torch.ones(4))
        if isinstance(result, Exception):
            raise result
        return [result]

    def clock(call: Callable[[], object], repeats: int) -> float:
        call()
        return times.get(tile(), 5.0)

    shipped, best, tried, skipped = tune_kernel(KernelCall("forward", call), M7C, H200, clock)
    assert shipped.tile == SHIPPED
    return best.tile, tried, skipped


def test_the_fastest_tile_wins() -> None:
    assert tune({OTHERS[3]: 4.0, OTHERS[5]: 3.0}) == (OTHERS[5], len(OTHERS) + 1, 0)


def test_a_gain_within_the_noise_is_none() -> None:
    assert tune({OTHERS[3]: 4.97})[0] == SHIPPED


def test_tiles_that_disagree_or_fail_are_skipped() -> None:
    wrong: dict[AnyTile, Tensor | Exception] = {
        OTHERS[0]: torch.tensor([1, 1, 1, 1.1]),
        OTHERS[1]: torch.full((4,), torch.nan),
        OTHERS[2]: RuntimeError("out of resource: shared memory"),
    }
    times = dict.fromkeys(wrong, 1.0) | {OTHERS[4]: 2.0}
    assert tune(times, wrong) == (OTHERS[4], len(OTHERS) - 2, 3)


def test_a_tile_that_breaks_the_context_ends_the_tuning_and_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"forward with Tile\(rows=.* broke the GPU's context; nothing is stored"):
        tune({}, {OTHERS[0]: RuntimeError("CUDA error: an illegal memory access was encountered")})


def test_queries_that_see_nothing_and_block_ids_are_compared_too() -> None:
    lse = torch.tensor([-torch.inf, 1.0])
    assert agrees(lse, lse)
    assert not agrees(torch.tensor([1.0, 1.0]), lse)
    ids = torch.arange(10_000)
    assert agrees(ids.clone().index_fill_(0, torch.tensor([5]), 0), ids)
    assert not agrees(ids + 1, ids)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What every launch would be given; nothing is run."""
    launches: list[dict] = []
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: launches.append(kwargs)
    )
    return launches


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        (M7C, ["forward", "score", "pairs", "dkv", "dq", "backward", "union"]),
        (
            TuneShape(64, 4, 128, torch.bfloat16, NSASpec(), 8192),
            ["forward_copied", "score", "pairs", "dkv_copied", "dq_copied", "halves", "union_copied"],
        ),
    ],
)
def test_every_kernel_of_a_shape_is_launched_with_the_tile_in_turn(
    launched: list[dict], shape: TuneShape, kernels: list[str]
) -> None:
    names = []
    for each in kernel_calls(shape, torch.device("meta")):
        names.append(each.kernel)
        tile = candidates(each.kernel, "hopper", shape.dtype, shape.dim)[-1]
        launched.clear()
        with using({each.kernel: tile}):
            each.call()
        sizes = {"num_warps": tile.warps, "num_stages": tile.stages}
        if isinstance(tile, RowTile):
            sizes["ROWS"] = tile.rows
        elif isinstance(tile, Tile):
            sizes["BN"] = tile.keys
        assert any(sizes.items() <= launch.items() for launch in launched), each.kernel
    assert names == kernels


def test_all_candidates_are_launched_for_compilation(launched: list[dict]) -> None:
    launch_candidates(M7C, H200)
    tiles = {(x["BM"], x["BN"], x["num_warps"], x["num_stages"]) for x in launched if x.get("W") == 512 and "DP" in x}
    forward = {(t.rows, t.keys, t.warps, t.stages) for t in (SHIPPED, *OTHERS) if isinstance(t, Tile)}
    assert forward <= tiles


def test_without_a_gpu_the_refusal_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"torch finds none here: run it on the machine that trains"):
        measure_tiles(M7C)


@pytest.mark.parametrize(
    ("doors", "timed"),
    [
        (("copies_heads", "specializes_warps", "copies_blocks", "reads_rows"), ["score", "dq", "backward"]),
        (("copies_boxes", "walks_heads", "tokens_of_boxes"), ["pairs", "dkv", "dq", "backward"]),
    ],
)
def test_kernels_that_others_replace_on_hopper_are_not_timed(
    launched: list[dict], monkeypatch: pytest.MonkeyPatch, doors: tuple[str, ...], timed: list[str]
) -> None:
    for door in doors:
        monkeypatch.setattr(tune_module, door, lambda *tensors: True)
    assert [each.kernel for each in kernel_calls(M7C, torch.device("meta"))] == timed


def test_lists_are_timed_even_where_large_calls_have_none(
    launched: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large call of sequences of 1,024 tokens is nothing but prefixes; in a small one, lists have every token."""
    prefixes: list[object] = []

    def write_query_gradient(*arguments: object) -> None:
        *_, left, prefix = arguments
        assert left is not None
        prefixes.append(prefix)

    monkeypatch.setattr(tune_module, "prefix_of", lambda *inputs: "prefix")
    monkeypatch.setattr(tune_module, "write_query_gradient", write_query_gradient)
    monkeypatch.setattr(tune_module, "selected_backward", lambda *_, prefix, **__: prefixes.append(prefix) or [])
    for length in (1024, 2048):
        calls = {each.kernel: each.call for each in kernel_calls(replace(M7C, length=length), torch.device("meta"))}
        calls["dq"]()
        calls["backward"]()
    assert prefixes == [None, None, "prefix", "prefix"]
