"""The first tokens of a sequence chose every block: the dense branches' kernels give their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE, poisoned_memory, relative_rmse

# After devices, which sets up the interpreter.
from tamis.attention import op  # isort: skip
from tamis.attention.kernels import launch, tuned  # isort: skip
from tamis.attention.kernels.banded import keys, keys_on_hopper  # isort: skip
from tamis.attention.kernels.banded.queries import Rows  # isort: skip
from tamis.attention.kernels.selected import backward, lists, pairs  # isort: skip
from tamis.attention.packing import PackedRow, PackedTables, ids_in_row  # isort: skip
from tamis.attention.spec import NSASpec  # isort: skip
from tests.attention.kernels.gluon_on_cpu import kernels_on_cpu, takes_half  # isort: skip
from tests.attention.kernels.test_selected import random_ids  # isort: skip

__all__ = ["poisoned_memory"]
SPEC = NSASpec(l=8, d=4, l_sel=32, n_sel=4, w=40)
PREFIX = SPEC.n_sel * SPEC.l_sel
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="tests.gpu.matrix has these shapes on a GPU")


@pytest.fixture
def on_cpu(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes the kernel in Gluon, which runs on the CPU, and every call counts as large."""
    name = "key_gradients_by_head"
    monkeypatch.setattr(keys_on_hopper, name, kernels_on_cpu(keys_on_hopper, name)[name])
    monkeypatch.setattr(keys, "specializes_warps", takes_half)
    monkeypatch.setattr(backward, "fills_the_gpu", lambda q: True)


def tables_of(documents: tuple[int, ...], tokens: int, spec: NSASpec = SPEC) -> PackedTables:
    row = PackedRow.of(torch.tensor([0, *documents]).cumsum(0, dtype=torch.int32), tokens, spec)
    return PackedTables.of(row.flat, len(documents), tokens, max(documents), spec)


class Call:
    """The selected branch's backward pass on fresh inputs."""

    def __init__(
        self, batch: int, tokens: int, groups: int, heads: int, documents: tuple[int, ...] = (), spec: NSASpec = SPEC
    ) -> None:
        generator = torch.Generator().manual_seed(tokens + heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, tokens, *shape, generator=generator).half()

        self.spec = spec
        self.packed = tables_of(documents, tokens, spec) if documents else None
        self.q, self.k, self.v = normal(groups * heads, 64), normal(groups, 64), normal(groups, 64)
        self.dout, self.gates = normal(groups * heads, 64), normal(groups * heads)
        chosen = [random_ids(spec, batch, n, groups, generator) for n in documents or (tokens,)]
        self.ids = ids_in_row(torch.cat(chosen, dim=1), self.packed)
        out, self.lse = pairs.selected_forward(self.q, self.k, self.v, self.ids, spec, trusted=True, packed=self.packed)
        product = (out.float() * self.dout.float()).sum(-1) * self.gates.float()
        self.delta = product.transpose(1, 2).contiguous()
        self.rows = Rows(self.lse, self.gates.float().transpose(1, 2).contiguous(), self.delta)

    def gradients(self, with_prefix: bool, with_window: bool = True, **cut: Any) -> list[Tensor]:
        window = op.window_band(self.k, self.v, self.spec, self.packed), self.rows
        prefix = op.prefix_of(self.q, self.k, self.v, self.dout, self.rows, self.spec, self.packed)
        assert prefix is not None
        dq = torch.full_like(self.q, torch.nan)
        dk, dv = backward.selected_backward(
            self.q, self.k, self.v, self.ids, self.lse, self.dout, self.gates, self.delta, dq, self.spec, trusted=True,
            packed=self.packed, dense=[window] if with_window else (), prefix=prefix if with_prefix else None, **cut,
        )  # fmt: skip
        return [dq, dk, dv]


CALLS = {
    "two sequences": {"batch": 2, "tokens": 261, "groups": 1, "heads": 2},
    "groups of 5": {"batch": 1, "tokens": 203, "groups": 2, "heads": 5},
    "a prefix of 144 tokens": {
        "batch": 1, "tokens": 250, "groups": 1, "heads": 2, "documents": (60, 190), "spec": NSASpec(8, 4, 48, 3, 40),
    },
    "a prefix of 144 tokens, two sequences": {
        "batch": 2, "tokens": 250, "groups": 1, "heads": 2, "spec": NSASpec(8, 4, 48, 3, 40),
    },
    "one block behind the prefix": {"batch": 2, "tokens": 130, "groups": 1, "heads": 3},
    "no longer than the prefix": {"batch": 2, "tokens": 100, "groups": 2, "heads": 2},
    "documents": {"batch": 1, "tokens": 408, "groups": 1, "heads": 6, "documents": (1, 190, 9, 30, 178)},
    "an empty document at the end": {"batch": 1, "tokens": 170, "groups": 1, "heads": 1, "documents": (170, 0)},
    "documents no longer than the prefix": {
        "batch": 1, "tokens": 231, "groups": 1, "heads": 4, "documents": (103, 128, 0),
    },
}  # fmt: skip


@ON_CPU
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_lists(on_cpu: None, name: str) -> None:
    call = Call(**CALLS[name])  # type: ignore[arg-type]
    for with_prefix, without in zip(call.gradients(True), call.gradients(False), strict=True):
        assert relative_rmse(with_prefix, without, floor=0.1) < 1e-3


@ON_CPU
@pytest.mark.parametrize("documents", [(), (9, 130, 191)], ids=["two sequences", "packed"])
def test_what_is_cut_into_chunks_gets_them_once(on_cpu: None, documents: tuple[int, ...]) -> None:
    call = Call(1 if documents else 2, tokens=330, groups=1, heads=3, documents=documents)
    whole, cut = call.gradients(False), call.gradients(True, chunk=96)
    assert max(relative_rmse(x, y) for x, y in zip(cut, whole, strict=True)) < 1e-3


@ON_CPU
@pytest.mark.parametrize("with_window", [False, True])
def test_a_sequence_of_nothing_but_a_prefix_has_no_lists(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, with_window: bool
) -> None:
    call = Call(batch=1, tokens=PREFIX, groups=1, heads=2)
    by_lists = call.gradients(False, with_window)
    monkeypatch.delattr(lists, "_mark_pairs")
    without_lists = call.gradients(True, with_window)
    assert max(relative_rmse(x, y) for x, y in zip(without_lists, by_lists, strict=True)) < 1e-3


@ON_CPU
def test_training_takes_it_unless_the_blocks_are_given(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An early token may have been given fewer blocks than there are."""
    call = Call(batch=1, tokens=150, groups=1, heads=2)
    taken = []
    monkeypatch.setattr(op, "selected_backward", lambda *a, prefix, **b: (taken.append(prefix), a[1:3])[1])
    monkeypatch.setattr(op, "key_gradients", lambda q, band, rows, dout: (band.k, band.v))
    compressed = [x[:, : SPEC.compressed_blocks(150)] for x in (call.k, call.v)]
    leaves = [x.requires_grad_() for x in (call.q, *compressed, call.k, call.v, call.k, call.v)]
    gates = torch.rand(1, 150, 2, 3).half()
    for ids in (None, call.ids):
        op.attention((*leaves, gates), [8, 4, 32, 4, 40], None, 0, 0, None, ids)[0].sum().backward()
    assert taken[0] is not None and taken[1] is None


def test_large_calls_of_short_sequences_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_model", lambda device: tuned.GpuModel("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(launch, "GLUON_PROVED_WITH", ("",))

    def takes(batch: int = 16, tokens: int = 2048, dim: int = 64, longest: int = 0, **spec: int) -> bool:
        q, lse = torch.empty(batch, tokens, 2, dim, dtype=torch.bfloat16), torch.empty(batch, 2, tokens)
        packed = replace(tables_of((tokens,), tokens), longest=longest) if longest else None
        return backward.takes_prefix(q, q, Rows(lse, lse, lse), NSASpec(**spec), packed)

    assert takes() and takes(batch=4, tokens=8192) and takes(batch=1, tokens=65536, longest=2048)
    others = {
        "a small call": {"batch": 15},
        "a long sequence": {"batch": 3, "tokens": 16384},
        "long documents": {"batch": 1, "tokens": 65536, "longest": 16384},
        "few blocks": {"batch": 130, "tokens": 256, "l_sel": 32, "n_sel": 3},
        "another head dim": {"dim": 128},
    }
    assert {name for name, shape in others.items() if takes(**shape)} == set()  # type: ignore[arg-type]
