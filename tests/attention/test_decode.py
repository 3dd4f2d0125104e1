"""The decode kernels against the specification, and the count of what they read."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE, DTYPES, LIMIT, assert_chosen_alike, relative_rmse

# After devices, which sets up the interpreter.
from tamis.attention.decode import nsa_decode, reads, use_kernels  # isort: skip
from tamis.attention.kernels.decode.splits import Splits, packed_groups, splits_for, tiles_for_step  # isort: skip
from tamis.attention.kernels.decode.step import _plan, decode  # isort: skip
from tamis.attention.spec import NSASpec  # isort: skip
from tamis.attention.verify import require_decode, verify_decode  # isort: skip

SPECS = [NSASpec(8, 4, 16, 4, 24), NSASpec(4, 4, 8, 5, 5), NSASpec(12, 3, 6, 8, 40), NSASpec(16, 2, 4, 3, 200)]


def caches(
    spec: NSASpec, batch: int, tokens: int, groups: int = 2, heads: int = 3, dim: int = 16, scale: float = 1.0,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Queries, compressed, selected, window ring and gates of `batch` sequences with room for `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (spec.compressed_blocks(tokens) + 1, tokens, min(spec.w, tokens))
    kept = [torch.randn(batch, length, 2, groups, dim, generator=generator) for length in lengths]
    q = torch.randn(batch, groups * heads, dim, generator=generator) * scale
    gates = torch.sigmoid(torch.randn(batch, groups * heads, 3, generator=generator))
    return [x.to(DEVICE, dtype) for x in (q, *kept, gates)]


def assert_agrees(
    inputs: list[Tensor], positions: Tensor, spec: NSASpec, splits: Splits | None = None
) -> tuple[Tensor, Tensor]:
    exact = [x.float() for x in inputs]
    expected, ids, read = nsa_decode(*exact, positions, spec, kernels=False)
    got, got_ids, got_read = decode(*inputs, positions, spec, splits=splits)
    assert relative_rmse(got, expected) < LIMIT[inputs[0].dtype]
    if inputs[0].dtype == torch.float32:
        for b, position in enumerate(positions.tolist()):
            q, k_cmp = exact[0][b, None, None], exact[1][b, None, :, 0]
            assert_chosen_alike(got_ids[b, None, None], ids[b, None, None], q, k_cmp, spec, position)
        assert torch.equal(got_read, read)
    return got_ids, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_one_token_over_the_caches_equals_the_specification(spec: NSASpec, dtype: torch.dtype) -> None:
    positions = torch.tensor([129, 76], device=DEVICE)
    assert_agrees(caches(spec, 2, 130, dtype=dtype), positions, spec)


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 31, 63, 64, 65])
def test_early_and_boundary_positions_agree(position: int) -> None:
    spec = SPECS[0]
    assert_agrees(caches(spec, 1, 80), torch.tensor([position], device=DEVICE), spec)


@pytest.mark.parametrize("splits", [Splits(1, 1, 1), Splits(3, 2, 2), Splits(5, 1, 4)])
def test_the_number_of_splits_does_not_change_the_result(splits: Splits) -> None:
    spec = SPECS[0]
    assert_agrees(caches(spec, 1, 150), torch.tensor([141], device=DEVICE), spec, splits)


@pytest.mark.parametrize(("groups", "heads", "dim"), [(1, 1, 64), (1, 6, 64), (2, 17, 24), (1, 2, 128)])
def test_any_group_size_and_head_dim_agrees(groups: int, heads: int, dim: int) -> None:
    spec = SPECS[0]
    inputs = caches(spec, 1, 100, groups=groups, heads=heads, dim=dim)
    assert_agrees(inputs, torch.tensor([98], device=DEVICE), spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spec", "groups", "heads", "dim", "packed"),
    [(SPECS[0], 2, 6, 16, 2), (SPECS[1], 4, 3, 64, 2), (SPECS[0], 2, 9, 16, 1), (SPECS[0], 3, 1, 24, 1)],
)
def test_many_sequences_agree_with_two_groups_to_a_scan_and_with_one(
    spec: NSASpec, groups: int, heads: int, dim: int, packed: int, dtype: torch.dtype
) -> None:
    sequences = 32 // groups + 1
    assert packed_groups(sequences, groups, heads, dim) == packed
    inputs = caches(spec, sequences, 90, groups=groups, heads=heads, dim=dim, dtype=dtype)
    assert_agrees(inputs, torch.arange(sequences, device=DEVICE) * 89 // (sequences - 1), spec)


def test_a_cache_without_room_for_a_compressed_block_agrees() -> None:
    spec = SPECS[0]
    inputs = caches(spec, 1, 7)
    inputs[1] = inputs[1][:, :0]
    assert_agrees(inputs, torch.tensor([5], device=DEVICE), spec)


def test_positions_may_be_a_view_of_others() -> None:
    spec, positions = SPECS[0], torch.tensor([98, 3, 57, 8], device=DEVICE)
    assert_agrees(caches(spec, 2, 100), positions[::2], spec)


def test_large_logits_stay_finite_and_right() -> None:
    spec = SPECS[0]
    assert_agrees(caches(spec, 1, 120, scale=30.0), torch.tensor([118], device=DEVICE), spec)


@pytest.mark.parametrize("at_once", [16, 64, 1024])
def test_many_blocks_are_ranked_by_runs_and_in_several_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tamis.attention.kernels.decode.step.SCORE_BLOCKS", at_once)
    monkeypatch.setattr("tamis.attention.kernels.decode.step._plan", _plan.__wrapped__)  # forgets other sizes
    spec = SPECS[0]
    assert_agrees(caches(spec, 1, 1400), torch.tensor([1398], device=DEVICE), spec)


@pytest.mark.parametrize("splits", [Splits(1, 1, 1), Splits(7, 1, 2)])
def test_equal_scores_in_different_splits_and_runs_go_to_the_lower_block(splits: Splits) -> None:
    spec, positions = SPECS[0], torch.tensor([1398], device=DEVICE)
    inputs = caches(spec, 1, 1400)
    inputs[1][:] = inputs[1][:, torch.arange(inputs[1].shape[1]) % 48]  # every score occurs seven times
    for x in inputs[:2]:
        x.mul_(4).round_().div_(4)  # products and their sums are exact, so equal scores are equal in any order
    got_ids, ids = assert_agrees(inputs, positions, spec, splits)
    assert torch.equal(got_ids, ids)


def test_equal_scores_go_to_the_lower_block() -> None:
    spec = SPECS[0]
    inputs = caches(spec, 1, 160)
    inputs[1].zero_()  # every compressed key alike
    ids = decode(*inputs, torch.tensor([158], device=DEVICE), spec)[1]
    assert ids.tolist() == [[[0, 1, 8, 9]] * 2]


def test_what_lies_beyond_the_position_is_never_read() -> None:
    spec, positions = SPECS[0], torch.tensor([45], device=DEVICE)
    inputs = caches(spec, 1, 96)
    poisoned = [x.clone() for x in inputs]
    poisoned[1][:, spec.visible_compressed(45) :] = float("nan")
    poisoned[2][:, 46:] = float("nan")
    for clean, dirty in zip(decode(*inputs, positions, spec), decode(*poisoned, positions, spec), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_prepared_launches_follow_addresses_streams_and_graphs() -> None:
    spec, positions = SPECS[0], torch.tensor([129, 76], device=DEVICE)
    first, second = (caches(spec, 2, 130, dim=64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    expected = decode(*second, positions, spec)
    decode(*first, positions, spec)  # prepared now
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = decode(*second, positions, spec)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(*first, positions, spec)
    for held, new in zip(first, second, strict=True):
        held.copy_(new)
    graph.replay()
    odd = [torch.empty(x.numel() + 1, device=DEVICE, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in second]
    for results in (on_side, captured):
        assert all(torch.equal(got, wanted) for got, wanted in zip(results, expected, strict=True))
    out, ids, _ = decode(*odd, positions, spec)  # at addresses that are no multiples of 16: another kernel
    assert relative_rmse(out, expected[0]) < LIMIT[torch.bfloat16] and torch.equal(ids, expected[1])


def test_the_kernels_give_the_same_bits_twice() -> None:
    spec, positions = SPECS[0], torch.tensor([140, 101], device=DEVICE)
    inputs = caches(spec, 2, 150)
    for first, again in zip(decode(*inputs, positions, spec), decode(*inputs, positions, spec), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize(("context", "expected"), [(8192, 2047), (16384, 2559), (32768, 3583), (65536, 5631)])
def test_reads_with_the_papers_settings_are_the_published_numbers(context: int, expected: int) -> None:
    spec = NSASpec()
    newest = context // spec.l_sel - 1
    ids = torch.tensor([0, *range(5, 5 + 13), newest - 1, newest], dtype=torch.int32)[None, None]
    assert reads(ids, torch.tensor([context - 1]), spec).tolist() == [[expected]]
    assert spec.reads_per_token(context) == expected


def test_reads_count_only_tokens_that_exist() -> None:
    spec = NSASpec(8, 4, 16, 4, 24)
    ids = torch.tensor([[[0, 1, 2, -1]]], dtype=torch.int32)
    assert reads(ids, torch.tensor([40]), spec).tolist() == [[9 + 41 + 24]]


def test_the_proof_on_a_device_passes_and_would_notice_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = NSASpec(4, 2, 4, 3, 6)
    checks = verify_decode(DEVICE, torch.float32, 2, 1, 16, spec, kernels=True)
    assert [str(check) for check in checks if not check.passed] == []
    monkeypatch.setattr("tamis.attention.kernels.decode.step.LOG2E", 1.45)  # scores a little too sharp
    monkeypatch.setattr("tamis.attention.kernels.decode.step._plan", _plan.__wrapped__)  # forgets the right scale
    failed = [
        check.name for check in verify_decode(DEVICE, torch.float32, 2, 1, 16, spec, kernels=True) if not check.passed
    ]
    assert failed == ["decode out", "decode of many out"]


@pytest.mark.parametrize(("broken", "failed"), [("union", "tile out"), ("pairs", "long tile out")])
def test_the_proof_on_a_device_would_notice_a_wrong_tile(
    broken: str, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tamis.attention.kernels.selected.{broken}.LOG2E", 1.45)
    checks = verify_decode(DEVICE, torch.float32, 2, 1, 16, NSASpec(2, 2, 4, 6, 6), kernels=True)
    assert failed in [check.name for check in checks if not check.passed]


def test_a_device_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = nsa_decode

    def doubled(*arguments, kernels=None):
        out, ids, read = wrong(*arguments, kernels=False)
        return (out if kernels is False else out * 2), ids, read

    monkeypatch.setattr(sys.modules["tamis.attention.verify"], "nsa_decode", doubled)  # not the function
    with pytest.raises(RuntimeError, match="is wrong on cpu: FAIL decode out"):
        require_decode(torch.device("cpu"), torch.float32, 2, 1, 16, NSASpec(4, 2, 4, 3, 6))


@pytest.mark.parametrize(
    ("sequences", "expected"), [(1, Splits(64, 4, 8)), (8, Splits(16, 4, 8)), (64, Splits(4, 1, 1))]
)
def test_a_cache_of_65536_tokens_is_split_as_it_was_measured(sequences: int, expected: Splits) -> None:
    spec, q = NSASpec(), torch.empty(sequences, 12, 64, dtype=torch.bfloat16)
    scan, finish = tiles_for_step(64, q, 2 * sequences)
    assert splits_for(2 * sequences, spec.compressed_blocks(65536) + 1, spec, scan, finish) == expected


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("programs", [1, 3, 33, 500, 4096])
def test_a_short_cache_is_never_split_into_nothing(programs: int, blocks: int) -> None:
    spec, q = NSASpec(), torch.empty(1, 12, 64, dtype=torch.bfloat16)
    splits = splits_for(programs, blocks, spec, *tiles_for_step(64, q, programs))
    assert splits.compressed == 1
    assert 1 <= splits.window <= 4
    assert 1 <= splits.selected <= 8


@pytest.mark.parametrize(("heads", "expected"), [(128, True), (130, False)])
def test_groups_wider_than_the_kernels_take_are_left_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, heads: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(1, heads, 64))
    assert use_kernels(q, groups=2) is expected  # type: ignore[arg-type]
