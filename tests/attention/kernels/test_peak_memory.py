"""Peak memory of forward and backward, counted without a GPU: every allocation is made, the kernels are not run."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime.interpreter import InterpretedFunction

from tamis.attention import NSASpec, nsa_attention
from tamis.attention import functional as backend
from tamis.attention.kernels import tape
from tamis.attention.kernels.banded import queries
from tamis.attention.kernels.hopper import boxes
from tamis.attention.kernels.selected import union
from tamis.attention.packing import PackedRow

LIMIT_GIB = 1.2
TOKENS = 65536

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts allocations of the interpreter's launches")


def packed_row(length: int, spec: NSASpec) -> PackedRow:
    """Equal documents, and room for as many others as training ever leaves."""
    ends = torch.arange(0, TOKENS + 1, length, dtype=torch.int32)
    return PackedRow.of(torch.nn.functional.pad(ends, (0, 8192), value=TOKENS), TOKENS, spec)


def peak_gib(length: int, is_packed: bool = False) -> float:
    spec, batch, dtype = NSASpec(), TOKENS // length, torch.bfloat16
    blocks, options = spec.compressed_blocks(length), {}
    if is_packed:
        row = packed_row(length, spec)
        options = {"cu_seqlens": row, "max_seqlen": length}
        batch, length, blocks = 1, TOKENS, row.layout(spec).last_position.numel()

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, requires_grad=True)

    keys = [tensor(batch, n, 2, 64) for n in (blocks, blocks, length, length, length, length)]
    inputs = [tensor(batch, length, 12, 64), *keys, tensor(batch, length, 12, 3)]
    dout = torch.empty(batch, length, 12, 64, dtype=dtype)  # an input of the backward pass, as in `tamis bench`
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Else no call is repeated from a tape.
        patch.setattr(torch.autograd.profiler, "_is_profiler_enabled", False)
        out = nsa_attention(*inputs, spec, backend="triton", **options)
        out.backward(dout)
    total = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak / (1 << 30)


@pytest.mark.parametrize("is_packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("length", [2048, 8192, 16384, 65536])
def test_m7c_needs_less_than_the_limit_above_its_inputs(
    length: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    monkeypatch.setattr(backend, "why_no_kernels", lambda *args: None)  # bf16 is wrong there only when kernels run
    for how in ("ordinary", "recorded", "repeated"):
        assert 0.5 < peak_gib(length, is_packed) < LIMIT_GIB, how
    assert [type(known) for known in tape._tapes.values()] == [tape.Tape] * 2


@pytest.mark.parametrize("length", [2048, 8192])
def test_so_does_a_large_call_in_boxes_whose_window_is_last(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of launches on Hopper, with kernels that do nothing."""
    order = []

    class Nothing:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, W, **constants: order.append(W)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    monkeypatch.setattr(boxes, "attend_in_boxes", Nothing())
    for module in (queries, union):
        monkeypatch.setattr(module, "takes_boxes", lambda *tensors: True)
    monkeypatch.setattr(backend, "why_no_kernels", lambda *args: None)
    assert 0.5 < peak_gib(length) < LIMIT_GIB
    assert order == [0, 0, NSASpec().w], "the compressed branch, unions, the window"
