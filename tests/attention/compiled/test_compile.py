"""Every kernel configuration we ship compiles for A100 and H100, fits their shared memory; hot kernels do not spill."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import triton

from tamis.attention.kernels.launch import GLUON_PROVED_WITH
from tests.attention.compiled.ahead_of_time import MOST_STACK, PATIENCE_S, report_of, start_compiling

HOT = ("_forward_kernel", "_dq_kernel", "_dkv_kernel", "_score_kernel")
OTHERS = ("_top_kernel", "_mix_kernel", "_delta_kernel")
DECODE = ("_scan_kernel", "_finish_kernel")
COPIED = "_dkv_copied_kernel"  # on Hopper alone
BY_HEAD = ("forward_by_head", "key_gradients_by_head")  # the same, at head dim 64 with the Triton they are proved with
BOXES, SCORES = "attend_in_boxes", "score_by_head"  # on Hopper with the Triton they are proved with
# dtype:heads per group:head dim. Head dim 256 is tightest on the smaller shared memory.
SHAPES = {
    80: ["bfloat16:6:64", "bfloat16:16:128", "bfloat16:2:256"],
    90: ["bfloat16:6:64", "bfloat16:16:128", "float32:6:64"],
}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
SMALL_MEMORY = 99 << 10  # of an L40S; test_tuned.py has the kernels that need other tiles there
Compiled = Callable[[int], dict[str, dict[str, dict]]]
pytestmark = pytest.mark.timeout(PATIENCE_S + 50)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """What each kernel needs, by shape and name. Both architectures compile at once, where there is something to."""
    running = {arch: start_compiling("tests.attention.compiled.ahead_of_time", arch, *SHAPES[arch]) for arch in SHAPES}
    yield cache(lambda arch: report_of(running[arch]))
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("arch", SHAPES)
def test_every_configuration_compiles_fits_and_is_fast_where_it_matters(arch: int, compiled: Compiled) -> None:
    kernels = {name: needs for shape in compiled(arch).values() for name, needs in shape.items()}
    assert {name.split()[0] for name in kernels} >= {*HOT, *OTHERS, *DECODE}
    assert {name: k["shared"] for name, k in kernels.items() if k["shared"] > SHARED_MEMORY[arch]} == {}
    assert [name for name, k in kernels.items() if k["split_reductions"]] == [], "Triton leaves lanes out of those"
    multiplying = {name: k for name, k in kernels.items() if k["wgmma"] + k["mma"]}
    hot = {name: k for name, k in multiplying.items() if name.startswith((*HOT, COPIED, *BY_HEAD))}
    may_spill = ("_dkv_kernel",) if arch == 80 else ()  # 40 bytes; with half the keys it would not, and read all twice
    spilling = [name for name, k in hot.items() if "'R': 6" in name and k["stack"] > MOST_STACK]
    assert [name for name in spilling if not name.startswith(may_spill)] == []
    if arch == 90:
        assert any(name.startswith(COPIED) for name in kernels), "rows copied at head dim 128"
        if triton.__version__.startswith(GLUON_PROVED_WITH):
            by_head = [name for name in kernels if name.startswith(BY_HEAD)]
            assert len(by_head) == 10, "two kernels of two branches and one of prefixes, packed and not"
            prefixes = [name for name in kernels if name.startswith("_dq_kernel") and "'PREFIX': 1024" in name]
            assert len(prefixes) == 4, "a part of a sequence, or all, packed and not"
            assert {name: kernels[name]["stack"] for name in by_head if kernels[name]["stack"]} == {}
        assert {name: k for name, k in hot.items() if k["mma"]} == {}, "not on Hopper's own matrix instructions"
        spills = {name: k["stack"] for name, k in hot.items() if "'D': 128" in name and k["stack"] > MOST_STACK + 8}
        assert spills == {}, "head dim 128 keeps its sums in registers"


def test_all_but_two_tiles_of_an_a100_fit_smaller_gpus(compiled: Compiled) -> None:
    shapes = (kernels for shape, kernels in compiled(80).items() if not shape.endswith(":256"))
    kernels = {name: needs["shared"] for shape in shapes for name, needs in shape.items()}
    too_large = {name.split()[0] for name, shared in kernels.items() if shared > SMALL_MEMORY}
    assert too_large == {"_forward_kernel", "_forward_tiles"}


# Kernel, and whether its keys are copied → bytes. Both serve head dim 128 and were faster on an H200 than what spills
# nothing.
MOST_SPILLED = {("backward_halves", False): 16, ("_forward_tiles", True): 8}
IN_GLUON = ("attend_unions", "attend_items")  # on Hopper with the Triton they are proved with
MULTIPLYING = ("_forward_tiles", "_forward_items", "backward_items", "backward_halves", *IN_GLUON)
LISTS = (
    "_unite_choices",
    "_mark_pairs",
    "_count_tiles",
    "_sum_",
    "_place_pairs",
    "_cut_lists",
    "_transpose_statistics",
)
SELECTED = (*MULTIPLYING, *LISTS, "merge_")


def may_spill(name: str) -> int:
    return MOST_SPILLED.get((name.split()[0], "'COPIED': True" in name), MOST_STACK)


@pytest.mark.parametrize("arch", SHAPES)
def test_the_selected_branch_does_not_spill(arch: int, compiled: Compiled) -> None:
    groups = ("bfloat16:6:64", "bfloat16:16:128", "large")
    shapes = [kernels for group, kernels in compiled(arch).items() if group in groups]
    selected = {name: k for kernels in shapes for name, k in kernels.items() if name.startswith(SELECTED)}
    assert {name: k["stack"] for name, k in selected.items() if k["stack"] > may_spill(name)} == {}
    multiplying = {name: k for name, k in selected.items() if name.startswith(MULTIPLYING)}
    proved = triton.__version__.startswith(GLUON_PROVED_WITH)
    there = {"_forward_tiles", "_forward_items", "backward_items"}
    if arch == 90:
        there |= {"backward_halves", *(IN_GLUON if proved else ())}
    assert {name.split()[0] for name in multiplying} == there
    if arch == 90:
        assert all(k["wgmma"] and not k["mma"] for k in multiplying.values()), "not on Hopper's own matrix instructions"


@pytest.mark.skipif(not triton.__version__.startswith(GLUON_PROVED_WITH), reason="these are Triton's kernels there")
def test_boxes_and_scores_on_hopper_spill_no_more_than_was_measured(compiled: Compiled) -> None:
    shapes = compiled(90).values()
    kernels = {name: k for shape in shapes for name, k in shape.items() if name.startswith((BOXES, SCORES))}
    boxes = {name: k["stack"] for name, k in kernels.items() if name.startswith(BOXES)}
    for form in ("'R': 6, 'D': 64", "'R': 16, 'D': 128"):
        assert len([name for name in boxes if form in name]) >= 3, "of two branches and unions"
    assert all(k["wgmma"] and not k["mma"] and k["shared"] <= SHARED_MEMORY[90] for k in kernels.values())
    assert {name: n for name, n in boxes.items() if "'D': 64" in name and n > 0} == {}
    unions = {name: n for name, n in boxes.items() if "'STRIDE': 1, 'W': 0" in name}
    assert max(unions.values()) <= 32
    assert max(n for name, n in boxes.items() if name not in unions) <= 8
    scores = [k["stack"] for name, k in kernels.items() if name.startswith(SCORES)]
    assert scores and max(scores) <= 24


@pytest.mark.parametrize("arch", SHAPES)
def test_the_kernels_of_a_decode_step_do_not_spill(arch: int, compiled: Compiled) -> None:
    kernels = compiled(arch)["decode"].values()
    assert len(kernels) == 5  # few and many sequences scan with tiles of their own
    assert any(k["launches_early"] for k in kernels) == (arch >= 90)
    assert max(k["stack"] for k in kernels) <= MOST_STACK
    assert max(k["shared"] for k in kernels) <= SHARED_MEMORY[arch]
