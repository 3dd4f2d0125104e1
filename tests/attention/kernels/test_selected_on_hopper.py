"""The selected branch's kernels for Hopper against Triton's, and which shapes take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE, poisoned_memory, relative_rmse

# After devices, which sets up the interpreter.
from tamis.attention.kernels import launch, tuned  # isort: skip
from tamis.attention.kernels.gates import Mixture  # isort: skip
from tamis.attention.kernels.hopper import boxes  # isort: skip
from tamis.attention.kernels.selected import layout, pairs, pairs_on_hopper, union, union_on_hopper  # isort: skip
from tamis.attention.packing import PackedRow, PackedTables  # isort: skip
from tamis.attention.spec import NSASpec  # isort: skip
from tests.attention.kernels.gluon_on_cpu import kernels_on_cpu, takes_half  # isort: skip
from tests.attention.kernels.test_selected import Case  # isort: skip

__all__ = ["poisoned_memory"]
SPEC = NSASpec(n_sel=3)
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="tests.gpu.matrix has these shapes on a GPU")


def unions_of_every_tile(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = union.union_forward(*inputs, **options)
    return out, lse


FORMS = {
    "unions": (unions_of_every_tile, 64),
    "unions in boxes": (unions_of_every_tile, 128),
    "pairs": (pairs.pairs_forward, 64),
}  # by name, with their head dim


@pytest.fixture
def on_cpu(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes the kernels, which run on the CPU."""
    kernels = {union_on_hopper: "attend_unions", pairs_on_hopper: "attend_items", boxes: "attend_in_boxes"}
    for module, kernel in kernels.items():
        monkeypatch.setattr(module, kernel, kernels_on_cpu(module, kernel)[kernel])
    monkeypatch.setattr(boxes, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(union, "specializes_warps", takes_half)
    monkeypatch.setattr(union, "takes_boxes", lambda *tensors: takes_half(*tensors, dims=(128,)))
    monkeypatch.setattr(pairs, "reads_rows", lambda q, *rest: takes_half(q))


def assert_agrees(forward: Any, case: Case, **options: Any) -> None:
    out, lse = forward(*(x.float() for x in (case.q, case.k, case.v)), case.ids, case.spec, **options)
    got, got_lse = forward(case.q, case.k, case.v, case.ids, case.spec, **options)
    assert relative_rmse(got, out) < 1e-3
    torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)


SHAPES = {
    "odd length, two sequences": {"batch": 2, "tokens": 201, "heads": 6},
    "two groups of 3": {"tokens": 193, "groups": 2, "heads": 3},
    "one token": {"batch": 2, "tokens": 1, "heads": 3},
    "a group of 16": {"tokens": 130, "heads": 16},
}


@ON_CPU
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_compute_what_tritons_kernels_do(on_cpu: None, shape: str, form: str) -> None:
    forward, dim = FORMS[form]
    case = Case(SPEC, dim=dim, dtype=torch.float16, **SHAPES[shape])  # type: ignore[arg-type]
    assert_agrees(forward, case)
    assert bool(union.tokens_of_boxes(case.q, case.k, case.v, SPEC)) == (dim == 128)


@ON_CPU
@pytest.mark.parametrize("dim", [64, 128])
def test_unions_are_mixed_with_the_other_branches(on_cpu: None, dim: int) -> None:
    case = Case(SPEC, batch=2, tokens=133, groups=2, heads=6, dim=dim, dtype=torch.float16)
    cmp, win, out = torch.randn_like(case.q), torch.randn_like(case.q), torch.full_like(case.q, torch.nan)
    mixture = Mixture(out, case.gates, cmp, win, lambda: None)
    sel, _, _ = union.union_forward(case.q, case.k, case.v, case.ids, case.spec, mixture=mixture)
    gates, branches = case.gates.float(), torch.stack((cmp, sel, win), dim=-1).float()
    torch.testing.assert_close(out, (gates[..., None, :] * branches).sum(dim=-1).half())


@ON_CPU
def test_segments_and_chunks_of_a_sequence(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SHORTEST", 0)
    case = Case(SPEC, tokens=330, heads=6, dim=64, dtype=torch.float16)
    assert_agrees(pairs.pairs_forward, case, chunk=128, cached_bytes=64 * 6 * 128)


@ON_CPU
@pytest.mark.parametrize("dim", [64, 128])
def test_what_unions_give_and_leave_is_joined(on_cpu: None, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.setattr(union, "WORTHWHILE", 1.2)
    monkeypatch.setattr(pairs, "DENSE_UP_TO", 0)
    case = Case(NSASpec(n_sel=4), tokens=460, heads=6, dim=dim, dtype=torch.float16)
    tile = union.tokens_of_tile(case.q, case.k, case.v, case.spec)
    unions = union.unite_choices(case.ids, case.spec, tile, every_tile=False)
    assert unions.rest is not None
    left = (unions.rest[0, :, 0] >= 0).any(-1)  # of each token
    assert left.any() and not left.all()
    assert_agrees(pairs.selected_forward, case)


@ON_CPU
@pytest.mark.parametrize("form", FORMS)
def test_documents_of_a_packed_row_keep_to_themselves(on_cpu: None, form: str) -> None:
    documents = (1, 140, 9, 70)
    tokens, first_block, choices = sum(documents), 0, []
    for length in documents:
        for newest in (first_block + i // SPEC.l_sel for i in range(length)):
            chosen = sorted({first_block, max(first_block, newest - 1), newest})
            choices.append(chosen + [-1] * (SPEC.n_sel - len(chosen)))
        first_block += SPEC.selection_blocks(length)
    row = PackedRow.of(torch.tensor([0, *documents]).cumsum(0, dtype=torch.int32), tokens, SPEC)
    forward, dim = FORMS[form]
    case = Case(SPEC, tokens=tokens, heads=6, dim=dim, dtype=torch.float16)
    case.ids = torch.tensor(choices, dtype=torch.int32)[None, :, None]
    assert_agrees(forward, case, packed=PackedTables.of(row.flat, len(documents), tokens, max(documents), SPEC))


@ON_CPU
@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_reads_nothing_of_the_next_one(on_cpu: None, form: str) -> None:
    forward, dim = FORMS[form]
    case = Case(SPEC, batch=2, tokens=70, heads=6, dim=dim, dtype=torch.float16)
    for x in (case.q, case.k, case.v):
        x[1] = torch.nan
    out, lse = forward(case.q, case.k, case.v, case.ids, SPEC)
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()


OTHERS = {
    "over a cache": {"keys": 16, "start": 8},
    "dim": {"dim": 128},
    "blocks": {"l_sel": 32},
    "float32": {"dtype": torch.float32},
}
OF_UNIONS = {"one head per group": {"heads": 2}, "a cache longer than its keys": {"keys": 16}}


@pytest.mark.parametrize(
    ("door", "others"), [(union.copies_blocks, OTHERS | OF_UNIONS), (pairs.reads_rows, OTHERS)], ids=["unions", "pairs"]
)
def test_blocks_of_64_keys_at_head_dim_64_take_them(door: Any, others: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_model", lambda device: tuned.GpuModel("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(launch, "GLUON_PROVED_WITH", ("",))

    def takes(
        heads: int = 12, keys: int = 8, dim: int = 64, l_sel: int = 64, start: int = 0, dtype: Any = torch.bfloat16
    ) -> bool:
        q, k = (torch.empty(2, n, h, dim, dtype=dtype) for n, h in ((8, heads), (keys, 2)))
        return bool(door(q, k, k, NSASpec(l_sel=l_sel), start))

    assert takes() and takes(heads=4) and takes(dtype=torch.float16)
    assert {name for name, shape in others.items() if takes(**shape)} == set()
