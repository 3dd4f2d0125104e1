"""The kernel of `selected/hopper.py` against Triton's, and which shapes take it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE, poisoned_memory, relative_rmse

# After devices, which sets up the interpreter.
from tamis.attention.kernels import launch, tuned  # isort: skip
from tamis.attention.kernels.selected import hopper, pairs, union  # isort: skip
from tamis.attention.packing import PackedRow, PackedTables  # isort: skip
from tamis.attention.spec import NSASpec  # isort: skip
from tests.attention.kernels.gluon_on_cpu import kernels_on_cpu  # isort: skip
from tests.attention.kernels.test_selected import Case  # isort: skip

__all__ = ["poisoned_memory"]
SPEC = NSASpec(n_sel=3)
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="tests.gpu.matrix has these shapes on a GPU")


@pytest.fixture
def on_cpu(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes the kernel, which runs on the CPU."""
    for name, kernel in kernels_on_cpu(hopper, "attend_unions").items():
        monkeypatch.setattr(hopper, name, kernel)
    monkeypatch.setattr(union, "specializes_warps", lambda *tensors: tensors[0].dtype == torch.float16)


def assert_agrees(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, tables: PackedTables | None, every_tile: bool) -> None:
    def forward(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        unions = union.union_forward(*inputs, ids, SPEC, every_tile, packed=tables)
        return unions[:2] if every_tile else pairs.pairs_forward(*inputs, ids, SPEC, unions, packed=tables)

    out, lse = forward(*(x.float() for x in (q, k, v)))
    got, got_lse = forward(q, k, v)
    assert relative_rmse(got, out) < 1e-3
    torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)


SHAPES = {
    "odd length, two sequences": {"batch": 2, "tokens": 201, "heads": 6},
    "two groups of 3": {"tokens": 193, "groups": 2, "heads": 3},
    "one token": {"batch": 2, "tokens": 1, "heads": 2},
}


@ON_CPU
@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_what_tritons_kernel_does(on_cpu: None, shape: str) -> None:
    case = Case(SPEC, dim=64, dtype=torch.float16, **SHAPES[shape])  # type: ignore[arg-type]
    assert_agrees(case.q, case.k, case.v, case.ids, None, every_tile=True)


@ON_CPU
def test_tiles_with_long_unions_are_left_to_the_pairs(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(union, "WORTHWHILE", 1.2)
    case = Case(SPEC, tokens=330, heads=6, dim=64, dtype=torch.float16)
    counts = union.unite_choices(case.ids, SPEC, 128 // 6, every_tile=False).counts[..., 0]
    assert (counts < 0).any() and (counts > 0).any()
    assert_agrees(case.q, case.k, case.v, case.ids, None, every_tile=False)


@ON_CPU
def test_documents_of_a_packed_row_keep_to_themselves(on_cpu: None) -> None:
    documents = (1, 140, 9, 70)
    tokens, first_block, choices = sum(documents), 0, []
    for length in documents:
        for newest in (first_block + i // SPEC.l_sel for i in range(length)):
            chosen = sorted({first_block, max(first_block, newest - 1), newest})
            choices.append(chosen + [-1] * (SPEC.n_sel - len(chosen)))
        first_block += SPEC.selection_blocks(length)
    row = PackedRow.of(torch.tensor([0, *documents]).cumsum(0, dtype=torch.int32), tokens, SPEC)
    tables = PackedTables.of(row.flat, len(documents), tokens, max(documents), SPEC)
    case = Case(SPEC, tokens=tokens, heads=6, dim=64, dtype=torch.float16)
    ids = torch.tensor(choices, dtype=torch.int32)[None, :, None]
    assert_agrees(case.q, case.k, case.v, ids, tables, every_tile=True)


@ON_CPU
def test_a_sequence_reads_nothing_of_the_next_one(on_cpu: None) -> None:
    case = Case(SPEC, batch=2, tokens=70, heads=6, dim=64, dtype=torch.float16)
    for x in (case.q, case.k, case.v):
        x[1] = torch.nan
    out, lse, _ = union.union_forward(case.q, case.k, case.v, case.ids, SPEC)
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()


def test_blocks_of_64_keys_at_head_dim_64_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_model", lambda device: tuned.GpuModel("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(launch, "GLUON_PROVED_WITH", ("",))

    def takes(heads: int = 12, keys: int = 8, dim: int = 64, l_sel: int = 64, start: int = 0) -> bool:
        q, k = (torch.empty(2, n, h, dim, dtype=torch.bfloat16) for n, h in ((8, heads), (keys, 2)))
        return union.copies_blocks(q, k, k, NSASpec(l_sel=l_sel), start)

    assert takes() and takes(heads=4)
    others = {
        "one head per group": {"heads": 2},
        "over a cache": {"keys": 16, "start": 8},
        "a cache longer than its keys": {"keys": 16},
        "dim": {"dim": 128},
        "blocks": {"l_sel": 32},
    }
    assert {name for name, shape in others.items() if takes(**shape)} == set()
