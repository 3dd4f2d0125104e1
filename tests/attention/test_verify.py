"""The proof on the present device passes for right kernels and names what a wrong one breaks."""

import importlib
import itertools

import pytest
import torch

from tests.attention.devices import DEVICE  # isort: skip
from tamis.attention import NSASpec, op, reference
from tamis.attention.agreement import Check, larger_error, random_inputs, relative_rmse
from tamis.attention.kernels import tape
from tamis.attention.verify import (
    REFERENCE_SCORES,
    compared_rows,
    least_length,
    length_like,
    packed_ends,
    verify,
    verify_batch,
    verify_packed,
)

module = importlib.import_module("tamis.attention.verify")  # tamis.attention.verify is the function of this name
SMALL = NSASpec(l=4, d=2, l_sel=4, n_sel=4, w=6)


def failures(backend="triton", tokens=None):
    checks = verify(DEVICE, torch.float32, 2, 1, 16, SMALL, backend=backend, tokens=tokens)
    return {check.name for check in checks if not check.passed}, {check.name for check in checks}


def plant(monkeypatch, wrong=lambda branches, inputs: branches, choose=reference.select_blocks):
    """In the place of the kernels put `wrong(branches, inputs)`, which may spoil the three outputs, and `choose`."""

    def nsa_attention(*inputs, spec, backend, cu_seqlens=None):
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
        ids = choose(q, k_cmp, spec)
        branches = [
            reference.compressed_attention(q, k_cmp, v_cmp, spec),
            reference.selected_attention(q, k_sel, v_sel, ids, spec),
            reference.window_attention(q, k_win, v_win, spec),
        ]
        return reference.mix_branches(wrong(branches, inputs), gates)

    monkeypatch.setattr(module.attention, "nsa_attention", nsa_attention)
    monkeypatch.setattr(module.attention, "select_blocks", lambda q, k_cmp, spec, backend: choose(q, k_cmp, spec))


def test_right_kernels_pass_every_check():
    failed, names = failures(tokens=27)
    assert not failed
    assert {"compressed dk_cmp", "selected dv_sel", "window dq", "whole dgates", "selection loss"} <= names
    assert {"repeat difference", "causality difference"} <= names


def test_packed_documents_are_compared_and_kernels_that_cross_a_boundary_fail(monkeypatch):
    shape = (DEVICE, torch.float32, 2, 1, 16, SMALL, "triton", 27)
    checks = verify_packed(*shape)
    assert [check.name for check in checks[:3]] == ["packed out", "packed dq", "packed dk_cmp"] and len(checks) == 10
    assert checks[-1].name == "packed selection loss"
    assert all(check.passed for check in checks)
    right = op.window_forward
    monkeypatch.setattr(op, "window_forward", lambda *arguments: right(*arguments[:7], None, arguments[8]))
    tape.forget()
    assert "packed out" in {check.name for check in verify_packed(*shape) if not check.passed}


def test_documents_that_exceed_the_trained_length_are_no_failure():
    checks = verify_packed(DEVICE, torch.float32, 2, 1, 16, SMALL, "triton", 97, max_seqlen=16)
    assert len(checks) == 10 and all(check.passed for check in checks)


def test_the_last_documents_of_a_long_row_are_compared(monkeypatch):
    shape = (DEVICE, torch.float32, 2, 1, 16, SMALL, "triton", 27)
    checks = verify_packed(*shape, times=3)
    assert len(checks) == 10 and all(check.passed for check in checks)
    right = op.compressed_forward

    def forgets_the_last_token_of_a_long_row(*arguments, **options):
        out, lse = right(*arguments, **options)
        out[:, 3 * 27 - 1 :] = 0
        return out, lse

    monkeypatch.setattr(op, "compressed_forward", forgets_the_last_token_of_a_long_row)
    tape.forget()
    assert "packed out" in {check.name for check in verify_packed(*shape, times=3) if not check.passed}
    assert all(check.passed for check in verify_packed(*shape))


def test_a_kernel_that_is_wrong_in_large_calls_alone_is_caught(monkeypatch):
    shape = (DEVICE, torch.float32, 2, 1, 16, SMALL, 3, "triton", 27)
    checks = verify_batch(*shape)
    assert [check.name for check in checks[:2]] == ["batch of 3 out", "batch of 3 dq"]
    assert checks[-1].name == "batch of 3 selection loss" and len(checks) == 10
    assert all(check.passed for check in checks)
    right = op.window_forward

    def takes_the_first_sequence(q, *arguments):
        return right(q[:1].expand_as(q).contiguous() if q.shape[0] > 2 else q, *arguments)

    monkeypatch.setattr(op, "window_forward", takes_the_first_sequence)
    tape.forget()
    assert "batch of 3 out" in {check.name for check in verify_batch(*shape) if not check.passed}
    assert all(check.passed for check in verify(*shape[:6], "triton", 27))


FEW_SCORES = 2 * 64**2  # of a reference that holds the first 32 and the last 21 of 97 tokens


def test_right_kernels_pass_at_both_ends_of_a_long_sequence():
    assert compared_rows(97, 2, SMALL, FEW_SCORES) == [slice(0, 32), slice(76, 97)]
    checks = verify_batch(DEVICE, torch.float32, 2, 1, 16, SMALL, 2, "triton", 97, FEW_SCORES)
    assert len(checks) == 10 and all(check.passed for check in checks)


ENDS = ((0, True), (31, True), (32, False), (75, False), (76, True), (96, True))


@pytest.mark.parametrize(("token", "is_caught"), ENDS)
def test_a_wrong_token_at_either_end_of_a_long_sequence_is_caught(token, is_caught, monkeypatch):
    def wrong(branches, inputs):
        at_token = torch.arange(97, device=DEVICE)[:, None, None] == token
        return [*branches[:2], branches[2].masked_fill(at_token, 0.0)]

    plant(monkeypatch, wrong)
    checks = verify_batch(DEVICE, torch.float32, 2, 1, 16, SMALL, 2, "reference", 97, FEW_SCORES)
    failed = {check.name for check in checks if not check.passed}
    assert {"batch of 2 out", "batch of 2 dv_win"} <= failed if is_caught else not failed


@pytest.mark.parametrize(
    ("token", "is_caught"), [(31, True), (47, False), (48, True), (68, True), (69, False), (96, True)]
)
def test_a_wrong_choice_at_either_end_or_half_way_of_a_long_sequence_is_caught(token, is_caught, monkeypatch):
    def second_newest_twice(q, k_cmp, spec):
        ids = reference.select_blocks(q, k_cmp, spec)
        ids[:, token, :, 1] = ids[:, token, :, 2]
        return ids

    plant(monkeypatch, choose=second_newest_twice)
    checks = verify_batch(DEVICE, torch.float32, 2, 1, 16, SMALL, 1, "reference", 97, FEW_SCORES)
    failed = {check.name for check in checks if not check.passed}
    assert failed == ({"batch of 1 selection loss"} if is_caught else set())


def test_documents_as_long_as_a_sequence_are_compared(monkeypatch):
    shape = (DEVICE, torch.float32, 2, 1, 16, SMALL, 2, "triton", 97, FEW_SCORES)
    checks = verify_batch(*shape, packed=True)
    assert checks[0].name == "row of 2 out" and len(checks) == 10
    assert all(check.passed for check in checks)
    right = op.window_forward
    monkeypatch.setattr(op, "window_forward", lambda *arguments: right(*arguments[:7], None, arguments[8]))
    tape.forget()
    assert {"row of 2 out"} <= {check.name for check in verify_batch(*shape, packed=True) if not check.passed}
    assert all(check.passed for check in verify_batch(*shape))


def test_what_is_wrong_at_the_end_alone_is_no_small_share_of_the_whole():
    right = torch.cat([torch.ones(1, 64), torch.full((1, 1024), 1e-6)], dim=1)
    wrong = right.where(torch.arange(1088) < 64, 0.0)
    assert relative_rmse(wrong, right) < 1e-5
    assert larger_error(wrong, right, 64) == 1.0


def test_another_choice_among_equal_scores_is_no_failure(monkeypatch):
    def equal_scores(*arguments):
        inputs = random_inputs(*arguments)
        return [inputs[0], torch.zeros_like(inputs[1]), *inputs[2:]]

    def the_higher_of_two(q, k_cmp, spec):
        ids = reference.select_blocks(q, k_cmp, spec)
        assert bool((ids == 1).any())
        return torch.where((ids == 1) & (ids[..., 2:3] > 2), 2, ids)

    monkeypatch.setattr(module, "random_inputs", equal_scores)
    plant(monkeypatch, choose=the_higher_of_two)
    assert failures(backend="reference", tokens=97)[0] == set()
    assert all(check.passed for check in verify_batch(DEVICE, torch.float32, 2, 1, 16, SMALL, 2, "reference", 97))


@pytest.mark.parametrize("heads", [1, 12, 64])
@pytest.mark.parametrize("n_sel", [3, 16, 64])
@pytest.mark.parametrize("tokens", [6000, 2**14, 2**16, 2**20, 2**24])
def test_what_is_compared_of_a_sequence_fits_the_reference(tokens, n_sel, heads):
    rows = compared_rows(tokens, heads, NSASpec(n_sel=n_sel))
    assert (rows[0].start, rows[-1].stop) == (0, tokens)
    assert all(at.stop > at.start for at in rows)
    if len(rows) == 2:
        assert rows[0].stop <= rows[1].start
        assert heads * (rows[0].stop ** 2 + (tokens - rows[1].start) * tokens) <= REFERENCE_SCORES or tokens == 2**24


def test_a_packed_document_of_the_proof_chooses_among_its_blocks():
    tokens, spec = 2048, NSASpec()
    ends = packed_ends(tokens)
    assert max(b - a for a, b in itertools.pairwise(ends)) > spec.n_sel * spec.l_sel
    assert 0 in {b - a for a, b in itertools.pairwise(ends)}


def test_a_wrong_kernel_is_caught_in_its_branch_and_in_the_whole(monkeypatch):
    right = op.window_forward

    def forgets_a_head(*arguments, **options):
        out, lse = right(*arguments, **options)
        out[:, :, -1] = 0
        return out, lse

    monkeypatch.setattr(op, "window_forward", forgets_a_head)
    failed, _ = failures(tokens=22)
    assert {"window out", "whole out"} <= failed
    assert not failed & {"compressed out", "selected out", "selection loss", "causality difference"}


def test_a_wrong_gradient_is_caught_where_it_is(monkeypatch):
    def slightly_off(branches, inputs):
        branches[0].register_hook(lambda gradient: gradient * 1.001) if branches[0].requires_grad else None
        return branches

    plant(monkeypatch, slightly_off)
    failed, _ = failures()
    assert {"compressed dk_cmp", "whole dk_cmp", "whole dq"} <= failed
    assert not failed & {"compressed out", "whole out", "selected dk_sel", "window dv_win"}


def test_a_wrong_choice_of_blocks_is_caught(monkeypatch):
    plant(monkeypatch, choose=lambda q, k_cmp, spec: reference.select_blocks(q, torch.zeros_like(k_cmp), spec))
    assert failures(backend="reference")[0] == {"selection loss"}


def test_missing_forced_blocks_are_caught(monkeypatch):
    def never_the_first(q, k_cmp, spec):
        ids = reference.select_blocks(q, k_cmp, spec)
        return torch.where(ids == 0, 1, ids).unique_consecutive(dim=-1)

    plant(monkeypatch, choose=never_the_first)
    assert failures(backend="reference")[0] == {"selection loss"}


def test_a_choice_by_score_alone_is_caught_though_its_scores_are_higher(monkeypatch):
    def without_forced(q, k_cmp, spec):
        scores_BSGJ = reference.block_scores(q, k_cmp, spec).transpose(1, 2)
        newest = torch.arange(q.shape[1], device=DEVICE)[:, None, None] // spec.l_sel
        later = torch.arange(scores_BSGJ.shape[-1], device=DEVICE) > newest
        best, ids = scores_BSGJ.masked_fill(later, -1.0).topk(spec.n_sel)
        unused = scores_BSGJ.shape[-1]
        ids = ids.masked_fill(best < 0, unused).sort(dim=-1).values
        return ids.masked_fill(ids == unused, -1).to(torch.int32)

    plant(monkeypatch, choose=without_forced)
    assert failures(backend="reference")[0] == {"selection loss"}


def test_a_wrong_choice_in_documents_is_caught(monkeypatch):
    shape = (DEVICE, torch.float32, 2, 1, 16, SMALL, "triton", 97)
    assert all(check.passed for check in verify_packed(*shape, times=2))
    right = op.select_from_lse
    monkeypatch.setattr(op, "select_from_lse", lambda q, *arguments, **options: right(-q, *arguments, **options))
    tape.forget()
    assert {check.name for check in verify_packed(*shape, times=2) if not check.passed} == {"packed selection loss"}


def test_a_look_into_the_future_is_caught(monkeypatch):
    plant(monkeypatch, lambda branches, inputs: [*branches[:2], branches[2] + 1e-7 * inputs[6].mean()])
    assert failures()[0] == {"causality difference"}


def test_results_that_change_between_runs_are_caught(monkeypatch):
    runs = itertools.count()
    plant(monkeypatch, lambda branches, inputs: [*branches[:2], branches[2] * (1 + 1e-6 * next(runs))])
    assert "repeat difference" in failures()[0]


@pytest.mark.parametrize("measured", [float("nan"), float("inf"), 2e-5])
def test_what_is_not_finite_or_too_large_never_passes(measured):
    assert not Check("x", measured, 1e-5).passed


def test_the_reference_verifies_itself():
    assert not failures(backend="reference")[0]


@pytest.mark.parametrize(("heads", "seq_len"), [(12, 96), (12, 2048), (12, 2049), (12, 4096), (64, 2048)])
def test_kernels_are_proved_at_the_length_they_train_on(heads, seq_len):
    assert length_like(seq_len, heads, NSASpec()) == seq_len


@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
def test_sequences_with_a_single_compressed_block_are_proved_at_a_longer_one(tokens):
    length = length_like(tokens, 2, SMALL)
    assert length == least_length(SMALL) == 12
    assert not failures(tokens=length)[0]
    checks = verify_packed(DEVICE, torch.float32, 2, 1, 16, SMALL, "triton", length, times=2)
    assert all(check.passed for check in checks)


@pytest.mark.parametrize(("heads", "seq_len", "expected"), [(12, 8192, 5120), (12, 65536, 5120), (64, 8192, 2048)])
def test_long_sequences_are_proved_at_a_length_the_reference_can_hold(heads, seq_len, expected):
    length = length_like(seq_len, heads, NSASpec())
    assert length == expected
    assert heads * length**2 <= REFERENCE_SCORES
    assert NSASpec().selection_blocks(length) % 16 == 0  # divides as the blocks of the long sequence do
