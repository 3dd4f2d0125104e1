"""The kernels for Hopper of the dense branches and the scores against Triton's, and which shapes take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE, relative_rmse

# After devices, which sets up the interpreter.
from tamis.attention import NSASpec, op  # isort: skip
from tamis.attention.kernels import gates, launch, selection, tuned  # isort: skip
from tamis.attention.kernels.banded import keys, keys_on_hopper, queries, queries_on_hopper  # isort: skip
from tamis.attention.kernels.hopper import boxes, scores  # isort: skip
from tamis.attention.packing import PackedRow, PackedTables  # isort: skip
from tests.attention.kernels.gluon_on_cpu import kernels_on_cpu, takes_half  # isort: skip

SPEC = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=130)
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="tests.gpu.matrix has these shapes on a GPU")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes the kernels, which run on the CPU; each program takes several tiles."""
    modules = {
        queries_on_hopper: "forward_by_head",
        keys_on_hopper: "key_gradients_by_head",
        boxes: "attend_in_boxes",
        scores: "score_by_head",
    }
    for module, name in modules.items():
        monkeypatch.setattr(module, name, kernels_on_cpu(module, name)[name])
    for module in (queries_on_hopper, boxes):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    for module in (queries, selection):
        monkeypatch.setattr(module, "specializes_warps", takes_half)
    monkeypatch.setattr(queries, "takes_boxes", lambda *tensors: takes_half(*tensors, dims=(128,)))


def band_of(branch: str, k: Tensor, v: Tensor, tables: PackedTables | None) -> queries.Band:
    return (op.window_band if branch == "window" else op.compressed_band)(k, v, SPEC, tables)


def tables_of(documents: tuple[int, ...], tokens: int) -> PackedTables | None:
    if not documents:
        return None
    row = PackedRow.of(torch.tensor([0, *documents]).cumsum(0, dtype=torch.int32), tokens, SPEC)
    return PackedTables.of(row.flat, len(documents), tokens, max(documents), SPEC)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


CASES = {
    "odd length, two sequences": (2, 1, 2, 261, ()),
    "two groups": (1, 2, 2, 70, ()),
    "group of 4, whole tiles": (1, 1, 4, 128, ()),
    "group of 5": (2, 1, 5, 77, ()),
    "group of 6": (1, 2, 6, 133, ()),
    "group of 16": (2, 1, 16, 45, ()),
    "one token": (2, 1, 2, 1, ()),
    "packed": (1, 1, 2, 241, (1, 70, 9, 161)),
    "packed, an empty document at the end": (1, 1, 2, 131, (131, 0)),
}


@ON_CPU
@pytest.mark.parametrize("branch", ["window", "compressed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dim", [64, 128])
def test_they_compute_what_tritons_kernels_do(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, branch: str, case: str, dim: int
) -> None:
    torch.manual_seed(0)
    B, G, R, S, documents = CASES[case]
    N = S if branch == "window" else SPEC.compressed_blocks(S)
    if N == 0:
        return
    tables = tables_of(documents, S)
    q, dout, k, v = (normal(B, n, heads, dim) for n, heads in ((S, G * R), (S, G * R), (N, G), (N, G)))
    band, exact = band_of(branch, k, v, tables), band_of(branch, k.float(), v.float(), tables)
    out, lse = queries.banded_forward(q.float(), exact)
    got, got_lse = queries.banded_forward(q, band)
    assert relative_rmse(got, out) < 1e-3
    assert torch.equal(got_lse.isinf(), lse.isinf())
    torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)

    if dim != 64:
        return
    gates = torch.rand(B, G * R, S) - 0.5  # of both signs
    gates[gates.abs() < 0.1] = 0
    rows = queries.Rows(lse, gates, gates * (dout.float() * out).sum(-1).transpose(1, 2))
    wanted = keys.key_gradients(q.float(), exact, rows, dout.float())
    for programs in (1,) if branch == "window" else (1, 5 * B * G):  # rows of the compressed branch may be split
        monkeypatch.setattr(keys_on_hopper, "PROGRAMS_WANTED", programs)
        got = [torch.full_like(x, torch.nan) for x in (k, v)]
        keys_on_hopper.write_key_gradients(q, band, rows, dout, *got)
        assert max(relative_rmse(x, y, floor=0.1) for x, y in zip(got, wanted, strict=True)) < 1e-3


@ON_CPU
@pytest.mark.parametrize("dim", [64, 128])
def test_a_sequence_reads_nothing_of_the_next_one(on_cpu: None, dim: int) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (normal(2, 70, n, dim) for n in (2, 1, 1, 2))
    for x in (q, k, v, dout):
        x[1] = torch.nan
    band, lse = op.window_band(k, v, SPEC), torch.zeros(2, 2, 70)
    out, _ = queries.banded_forward(q, band)
    assert torch.isfinite(out[0]).all()
    if dim != 64:
        return
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    keys_on_hopper.write_key_gradients(q, band, queries.Rows(lse, lse + 1, lse), dout, dk, dv)
    assert all(torch.isfinite(x[0]).all() for x in (dk, dv))


@ON_CPU
@pytest.mark.parametrize("branch", ["window", "compressed"])
def test_boxes_of_head_dim_64(on_cpu: None, monkeypatch: pytest.MonkeyPatch, branch: str) -> None:
    torch.manual_seed(0)
    N = 133 if branch == "window" else SPEC.compressed_blocks(133)
    q, k, v = (normal(2, n, heads, 64) for n, heads in ((133, 12), (N, 2), (N, 2)))
    by_head, _ = queries.banded_forward(q, band_of(branch, k, v, None))
    monkeypatch.setattr(queries, "takes_boxes", takes_half)
    monkeypatch.delattr(queries_on_hopper, "forward_on_hopper")
    in_boxes, _ = queries.banded_forward(q, band_of(branch, k, v, None))
    assert relative_rmse(in_boxes, by_head) < 1e-3


@ON_CPU
@pytest.mark.parametrize(("heads_per_group", "documents"), [(3, ()), (16, ()), (6, (1, 40, 36))])
def test_the_window_is_mixed_with_the_other_branches(
    on_cpu: None, heads_per_group: int, documents: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tables = tables_of(documents, 77)
    q, k, v = (normal(1 if documents else 2, 77, n, 128) for n in (2 * heads_per_group, 2, 2))
    cmp, sel, gates = torch.randn_like(q), torch.randn_like(q), torch.rand(*q.shape[:3], 3).half()
    mixed = torch.full_like(q, torch.nan)
    win, _ = queries.banded_forward(q, op.window_band(k, v, SPEC, tables), mixture=(mixed, gates, cmp, sel))
    unmixed, _ = queries.banded_forward(q, op.window_band(k, v, SPEC, tables))
    assert torch.equal(win, unmixed)
    branches = torch.stack((cmp, sel, win), dim=-1).float()
    torch.testing.assert_close(mixed, (gates.float()[..., None, :] * branches).sum(dim=-1).half())


@ON_CPU
def test_a_large_call_runs_the_window_last_and_gives_the_same(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, gates = normal(1, 133, 6, 128), torch.rand(1, 133, 6, 3).half()
    branches = [normal(1, n, 2, 128) for n in (SPEC.compressed_blocks(133),) * 2 + (133,) * 4]
    results, order = [], []
    for name in ("window_forward", "selected_forward"):
        call = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *a, name=name, call=call: (order.append(name), call(*a))[1])
    for is_large in (False, True):
        monkeypatch.setattr(op, "fills_the_gpu", lambda q, is_large=is_large: is_large)
        results.append(op.attend(q, branches, gates, SPEC))
    assert order == ["window_forward", "selected_forward", "selected_forward", "window_forward"]
    assert all(torch.equal(first, last) for first, last in zip(*results, strict=True))


@ON_CPU
@pytest.mark.parametrize("heads_per_group", [1, 6, 16])
def test_scores_choose_what_tritons_kernel_does(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, heads_per_group: int
) -> None:
    """Several chunks of tokens, a last run that is not filled, and programs that share the runs of a tile."""
    torch.manual_seed(0)
    S, G = 1100, 2
    q, k = normal(2, S, G * heads_per_group, 128), normal(2, SPEC.compressed_blocks(S), G, 128)
    _, lse = queries.banded_forward(q, op.compressed_band(k, k, SPEC))
    monkeypatch.setattr(selection, "SCORE_BYTES", 4 * 2 * G * 300 * SPEC.selection_blocks(S))
    written = []
    monkeypatch.setattr(scores, "write_scores", lambda *a, write=scores.write_scores: (written.append(a), write(*a)))
    got = selection.select_from_lse(q, k, lse, SPEC)
    assert len(written) > 1
    assert torch.equal(got, selection.select_from_lse(q.float(), k.float(), lse, SPEC))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are not on a GPU count as an H200's."""
    monkeypatch.setattr(launch, "gpu_model", lambda device: tuned.GpuModel("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(launch, "GLUON_PROVED_WITH", ("",))


def heads(dim: int = 64, dtype: torch.dtype = torch.bfloat16, tokens: int = 8, batch: int = 2) -> Tensor:
    return torch.empty(batch, tokens, 4, dim, dtype=dtype)


def test_half_precision_at_head_dim_64_takes_them(on_hopper: None) -> None:
    split = torch.empty(2, 8, 9, 64, dtype=torch.float16).split([4, 2, 3], 2)  # as a layer projects them
    assert launch.specializes_warps(heads(), heads(dtype=torch.float16), *split)
    assert launch.specializes_warps(heads()[:, :5])
    assert launch.specializes_warps(heads(batch=1).expand(1, -1, -1, -1))
    others = {
        "dim": heads(128),
        "dtype": heads(dtype=torch.float32),
        "empty": heads(tokens=0),
        "heads lie apart": heads(tokens=4).transpose(1, 2),
        "sequences lie within each other": heads().transpose(0, 1),
        "one sequence for all": heads(batch=1).expand(2, -1, -1, -1),
        "one token for all": heads(tokens=1).expand(-1, 8, -1, -1),
        "tokens begin anywhere": torch.empty(1, 8, 257, dtype=torch.bfloat16)[..., :256].view(1, 8, 4, 64),
        "the first begins anywhere": torch.empty(8 * 256 + 1, dtype=torch.bfloat16)[1:].view(1, 8, 4, 64),
    }
    assert {name for name, x in others.items() if launch.specializes_warps(heads(), x)} == set()


@pytest.mark.parametrize("gpu", [None, tuned.GpuModel("NVIDIA A100", (8, 0)), tuned.GpuModel("NVIDIA B200", (10, 0))])
def test_other_gpus_take_tritons_kernels(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, gpu: tuned.GpuModel | None
) -> None:
    monkeypatch.setattr(launch, "gpu_model", lambda device: gpu)
    assert not launch.specializes_warps(heads())


def test_head_dim_64_takes_boxes_in_large_calls_of_short_sequences(on_hopper: None) -> None:
    assert launch.takes_boxes(*[heads(tokens=2048, batch=16)] * 3)
    assert launch.takes_boxes(*[heads(128)] * 3)
    others = {
        "a small call": heads(tokens=2048, batch=15),
        "a long sequence": heads(tokens=16384, batch=2),
        "float32": heads(128, dtype=torch.float32),
        "dim": heads(96, tokens=2048, batch=16),
    }
    assert {name for name, x in others.items() if launch.takes_boxes(x, x, x)} == set()


def test_other_versions_of_triton_take_tritons_kernels(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GLUON_PROVED_WITH", ("0.",))
    assert not launch.specializes_warps(heads())


@ON_CPU
@pytest.mark.parametrize(("heads_per_group", "start"), [(2, 0), (3, 0), (2, 5)])
def test_the_forward_kernel_takes_pairs_of_heads_from_the_first_token_on(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, heads_per_group: int, start: int
) -> None:
    taken = []
    monkeypatch.setattr(queries_on_hopper, "forward_on_hopper", lambda q, *rest: taken.append(q.shape))
    q, k = torch.randn(1, 7, heads_per_group, 64).half(), torch.randn(1, 7 + start, 1, 64).half()
    queries.banded_forward(q, op.window_band(k, k, SPEC), start)
    assert len(taken) == (heads_per_group == 2 and start == 0)


def test_every_branch_has_statistics_where_a_copy_may_begin(on_hopper: None) -> None:
    q = torch.randn(1, 3, 2, 64, device=DEVICE)  # six rows: without room, the second branch's would begin at byte 24
    _, weights, delta = gates.mix_backward(q, q, q, q, torch.rand(1, 3, 2, 3, device=DEVICE))
    for branch in range(3):
        rows = queries.Rows(weights[branch], weights[branch], delta[branch])
        assert keys.copies_rows_of_heads(q.half(), q.half(), rows)
    assert not keys.copies_rows_of_heads(q.half(), q.half(), rows._replace(gate=torch.empty(7)[1:]))
