"""Block selection by kernels against the reference: the same ids, or equal scores to float32 rounding."""

import pytest
import torch

from tests.attention.devices import DEVICE, DTYPES, assert_chosen_alike, poisoned_memory, random_inputs  # isort: skip
from tamis.attention import NSASpec, reference, select_blocks
from tamis.attention.kernels import selection as kernels
from tamis.attention.kernels.launch import tile_for

SMALL = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
__all__ = ["poisoned_memory"]


def selected(q, k_cmp, spec):
    return select_blocks(q, k_cmp, spec, backend="triton")


def assert_as_good_as_the_reference(q, k_cmp, spec):
    assert_chosen_alike(selected(q, k_cmp, spec), reference.select_blocks(q, k_cmp, spec), q, k_cmp, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spec", "tokens", "heads_per_group"),
    [
        (SMALL, 203, 2),
        (NSASpec(l=8, d=4, l_sel=8, n_sel=6, w=24), 97, 16),
        (NSASpec(l=16, d=4, l_sel=8, n_sel=5, w=24), 90, 1),
        (NSASpec(l=4, d=4, l_sel=12, n_sel=5, w=24), 90, 1),
        (NSASpec(l=4, d=4, l_sel=8, n_sel=3, w=24), 50, 2),
    ],
    ids=[
        "overlap 2",
        "scores above 2",
        "a compressed block longer than a selection block",
        "no overlap",
        "forced alone",
    ],
)
def test_ids_are_those_of_the_reference(poisoned_memory, dtype, spec, tokens, heads_per_group):
    q, k_cmp, *_ = random_inputs(spec, tokens=tokens, groups=1, heads_per_group=heads_per_group, dtype=dtype)
    assert_as_good_as_the_reference(q, k_cmp, spec)


MANY = NSASpec(l=8, d=4, l_sel=8, n_sel=9, w=24)  # six blocks are chosen by score, from several runs


@pytest.mark.parametrize("spec", [SMALL, MANY])
def test_equal_scores_give_the_lower_index(poisoned_memory, spec):
    """Keys of zero score all visible blocks alike, except for what the edges take away."""
    q, k_cmp, *_ = random_inputs(spec, tokens=203, groups=1)
    zero = torch.zeros_like(k_cmp)
    assert torch.equal(selected(q, zero, spec), reference.select_blocks(q, zero, spec))


@pytest.mark.parametrize("spec", [SMALL, MANY])
def test_scores_that_vanish_are_ties_too(poisoned_memory, spec):
    """One key takes all the weight: every other score is exactly 0, and the lowest blocks win."""
    q, k_cmp, *_ = random_inputs(spec, tokens=150, groups=1, heads_per_group=1)
    with torch.no_grad():
        q.fill_(1.0)
        k_cmp.fill_(-30.0)
        k_cmp[:, 20] = 30.0
    seen = spec.last_token(20)
    assert torch.equal(selected(q, k_cmp, spec)[:, seen:], reference.select_blocks(q, k_cmp, spec)[:, seen:])


def test_a_sequence_shorter_than_a_compressed_block_takes_its_only_block(poisoned_memory):
    q, k_cmp, *_ = random_inputs(SMALL, tokens=5, groups=1)
    assert torch.equal(selected(q, k_cmp, SMALL), reference.select_blocks(q, k_cmp, SMALL))


def test_chunks_and_tokens_one_by_one_choose_alike(poisoned_memory, monkeypatch):
    """Long sequences are scored in chunks, and large groups few tokens at a time: neither may change a choice."""
    q, k_cmp, *_ = random_inputs(SMALL, tokens=170, groups=1, heads_per_group=2)
    whole = selected(q, k_cmp, SMALL)
    monkeypatch.setattr(kernels, "SCORE_BYTES", 4 * 90 * 12)
    assert len(kernels._chunks(1, 170, 1, SMALL)) > 1
    monkeypatch.setattr(kernels, "HELD_BYTES", 0)
    assert_chosen_alike(selected(q, k_cmp, SMALL), whole, q, k_cmp, SMALL)


@pytest.mark.parametrize("tokens", [16, 8, 1])
def test_several_heads_in_one_product_score_as_one_by_one(poisoned_memory, monkeypatch, tokens):
    """Five heads' queries held for few tokens: two, four or all heads share a product, and the last is not full."""
    q, k_cmp, *_ = random_inputs(SMALL, tokens=110, groups=1, heads_per_group=5)
    row_bytes = q.shape[-1] * q.element_size()
    monkeypatch.setattr(kernels, "HELD_BYTES", 5 * tokens * row_bytes)
    assert kernels.tokens_held(5, tile_for("score", q).rows, row_bytes) == tokens
    assert_as_good_as_the_reference(q, k_cmp, SMALL)


@pytest.mark.parametrize("programs", [0, 10**6], ids=["all runs in one program", "one run to a program"])
def test_runs_shared_by_programs_score_the_same(poisoned_memory, monkeypatch, programs):
    q, k_cmp, *_ = random_inputs(SMALL, tokens=110, groups=1, heads_per_group=2)
    usual = selected(q, k_cmp, SMALL)
    monkeypatch.setattr(kernels, "PROGRAMS_OF_SCORES", programs)
    assert torch.equal(selected(q, k_cmp, SMALL), usual)


@pytest.mark.parametrize("held_bytes", [kernels.HELD_BYTES, 0], ids=["many tokens held", "one token held"])
def test_blocks_wider_than_a_tile_of_keys_are_scored_in_parts(poisoned_memory, monkeypatch, held_bytes):
    spec = NSASpec(l=4, d=1, l_sel=34, n_sel=4, w=4)
    assert kernels.runs_of(tile_for("score", torch.empty(16)).keys, spec)[0] > 1
    monkeypatch.setattr(kernels, "HELD_BYTES", held_bytes)
    q, k_cmp, *_ = random_inputs(spec, tokens=180, groups=1, heads_per_group=1)
    assert_as_good_as_the_reference(q, k_cmp, spec)


@pytest.mark.parametrize("spec", [NSASpec(), NSASpec(l_sel=1024), NSASpec(1024, 16, 2048), NSASpec(1, 1, 300, 3, 4)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_spec_asks_for_a_wider_tile_of_keys_than_was_proved(dim, spec):
    """Tiles of 128 keys at head dim 128 faulted on a GPU."""
    keys = tile_for("score", torch.empty(dim, dtype=torch.bfloat16)).keys
    parts, run = kernels.runs_of(keys, spec)
    assert keys <= 64 and run >= 1
    assert run * spec.pieces_per_selected + spec.pieces_per_compressed - 1 <= parts * keys  # every block that touches


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [5000, 40000])
def test_real_shapes_in_half_precision_lose_nothing(tokens):
    q, k_cmp, *_ = random_inputs(NSASpec(), tokens=tokens, heads_per_group=6, dim=64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert_as_good_as_the_reference(q, k_cmp, NSASpec())
