"""The model's own kernels compile for A100 and H100 in their precisions, load 16 bytes at once and do not spill."""

import pytest

from tests.attention.compiled.ahead_of_time import report_of, start_compiling

# Both half precisions differ in one conversion; one architecture shows that it compiles.
DTYPES = {80: ["bfloat16", "float32"], 90: ["bfloat16", "float16", "float32"]}
REGISTERS_OF_2048_THREADS = 32  # more, and a second row would not fit on the multiprocessor


@pytest.mark.parametrize("arch", DTYPES)
def test_kernels_load_wide_and_do_not_spill(arch: int) -> None:
    kernels = report_of(start_compiling("tests.model.ahead_of_time", arch, *DTYPES[arch]))
    cache_writes = {
        name: kernels.pop(name) for name in list(kernels) if name.startswith(("_compress", "_write", "_unroll"))
    }
    assert len(cache_writes) == len(DTYPES[arch]) * 7
    most_spilled = 112 if arch == 80 else 0  # by float32 products on an A100, which are for checks
    assert max(k["stack"] for k in cache_writes.values()) <= most_spilled
    assert len(kernels) == len(DTYPES[arch]) * 15
    assert {name: k["stack"] for name, k in kernels.items() if k["stack"]} == {}
    loss = {name: k for name, k in kernels.items() if name.startswith("_cross_entropy")}
    with_one = {*loss, *(n for n in kernels if n.startswith("_norm_backward"))}  # the target's logit; a row's norm
    assert {k["narrow_loads"] for name, k in kernels.items() if name in with_one} == {1}
    assert {k["narrow_loads"] for name, k in kernels.items() if name not in with_one} == {0}
    # On an A100, the kernel with a soft cap takes more registers, and one row at a time.
    two_rows = [k for name, k in loss.items() if arch == 90 or "'SOFT_CAP': 0.0" in name]
    assert len(two_rows) == len(DTYPES[arch]) * (4 if arch == 90 else 2)
    assert max(k["registers"] for k in two_rows) <= REGISTERS_OF_2048_THREADS


def test_later_tiles_of_a_prompt_compile_no_kernel() -> None:
    first, second, *others = report_of(start_compiling("tests.model.tile_variants"))
    # The first tile runs what training runs, the second adds a position, and the lists of long sequences.
    assert {"forward_by_head", "_forward_kernel"} & {*first}  # in Gluon with the Triton that is proved
    assert {"_forward_kernel", "_forward_items"} <= {*second}
    assert others == [[]] * 14
