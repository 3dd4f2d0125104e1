"""The record of compiled kernels: a change of any kind is compiled, and what is recorded is checked by a sample."""

from pathlib import Path

import pytest

from tests.attention.compiled.ahead_of_time import report_of, start_compiling
from tests.attention.compiled.record import RECORD, RENEW, Needs, read_record, write_record

SOURCE = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2)

@triton.jit
def scaled(x):
    return x * SCALE

@triton.jit
def kernel(x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x + i, scaled(tl.load(x + i)))
"""
SAME = SOURCE.replace("SCALE =", "# a line above\nSCALE =")
CHANGED = [SOURCE.replace(*change) for change in (("(2)", "(3)"), ("x * SCALE", "x + SCALE"), ("scaled(tl", "2 * (tl"))]


def compiled(record: Path, *sources: str, warps: int = 4) -> list[tuple[str, Needs]]:
    files = [record.with_name(f"{i}.py") for i in range(len(sources))]
    for file, source in zip(files, sources, strict=True):
        file.write_text(source)
    return report_of(start_compiling("tests.attention.compiled.variants", record, warps, *files))


def test_a_change_is_compiled_and_the_rest_is_read(tmp_path: Path) -> None:
    record = tmp_path / RECORD.name
    with pytest.warns(UserWarning, match=rf"does not hold 4 compiled kernels. To renew it: {RENEW}"):
        found = compiled(record, SOURCE, SAME, *CHANGED)
    keys = [key for key, _ in found]
    assert keys[0] == keys[1] and len(set(keys)) == 4
    first, *others = sorted(dict(found).items())
    untrue = {key: needs | {"registers": 999} for key, needs in others}
    write_record(record, {"variant.kernel": {first[0]: first[1], **untrue}})
    assert dict(compiled(record, SOURCE, *CHANGED)) == dict([first, *untrue.items()])
    with pytest.warns(UserWarning, match="does not hold 1 compiled"):
        assert compiled(record, SOURCE, warps=8)[0][0] not in keys
    write_record(record, {"variant.kernel": {first[0]: first[1] | {"stack": 8}, **untrue}})
    with pytest.raises(AssertionError, match=rf"variant.kernel {first[0]} is .*'stack': 8.*, compiled .*'stack': 0"):
        compiled(record, SOURCE, *CHANGED)


def test_the_shipped_record_is_small_and_can_be_read() -> None:
    assert RECORD.stat().st_size < 150_000
    entries = read_record(RECORD).values()
    assert all(needs.keys() >= {"registers", "stack"} for found in entries for needs in found.values())
