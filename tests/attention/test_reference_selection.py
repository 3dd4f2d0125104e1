"""Which blocks a query attends to: the forced ones, then the best, ties to the lower index, unused slots at the end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.attention import NSASpec, reference, select_blocks
from tests.attention import paper
from tests.attention.inputs import SMALL, Sizes, all_sizes, make_inputs, specs


@settings(max_examples=80)
@given(specs(), all_sizes(), st.integers(0, 99))
def test_chosen_blocks_equal_the_papers_statement(spec: NSASpec, sizes: Sizes, seed: int) -> None:
    inputs = make_inputs(spec, sizes, seed)
    ids = select_blocks(inputs["q"], inputs["k_cmp"], spec)
    chosen = [[[[j for j in slots if j >= 0] for slots in row] for row in element] for element in ids.tolist()]
    assert chosen == paper.select(inputs["q"], inputs["k_cmp"], spec)


@settings(max_examples=40)
@given(specs(), all_sizes(most_tokens=80), st.integers(0, 99))
def test_ids_are_well_formed_and_hold_the_forced_blocks(spec: NSASpec, sizes: Sizes, seed: int) -> None:
    inputs = make_inputs(spec, sizes, seed, torch.float32)
    ids = select_blocks(inputs["q"], inputs["k_cmp"], spec)
    assert ids.dtype == torch.int32
    assert ids.shape == (sizes.batch, sizes.tokens, sizes.groups, spec.n_sel)
    for t, slots in ((t, slots) for element in ids.tolist() for t, row in enumerate(element) for slots in row):
        newest = t // spec.l_sel
        used = min(spec.n_sel, newest + 1)
        assert slots[used:] == [-1] * (spec.n_sel - used)
        assert slots[:used] == sorted(set(slots[:used]))
        assert {0, max(0, newest - 1), newest} <= set(slots[:used])
        assert slots[used - 1] == newest


def test_equal_scores_go_to_the_lower_index() -> None:
    spec = NSASpec(
        l=4, d=4, l_sel=4, n_sel=5, w=8
    )  # a block's score is one probability, so equal ones are equal in every bit
    inputs = make_inputs(spec, Sizes(40))
    ids = select_blocks(torch.zeros_like(inputs["q"]), inputs["k_cmp"], spec)
    assert ids[0, :, 0].tolist()[4 * 4 :] == [[0, 1, 2, t // 4 - 1, t // 4] for t in range(16, 40)]


def test_even_attention_chooses_the_lowest_blocks_of_the_standard_geometry() -> None:
    spec, tokens = NSASpec(l=32, d=16, l_sel=64, n_sel=16, w=512), 1300
    q, k_cmp = torch.zeros(1, tokens, 6, 8), torch.randn(1, spec.compressed_blocks(tokens), 1, 8)
    ids = select_blocks(q, k_cmp, spec)
    assert all(ids[0, t, 0].tolist() == [*range(14), t // 64 - 1, t // 64] for t in range(17 * 64, tokens))


def test_blocks_that_score_nothing_tie_and_go_to_the_lower_index() -> None:
    inputs = make_inputs(SMALL, Sizes(64, groups=1), dtype=torch.float32)
    inputs["k_cmp"] = torch.zeros_like(inputs["k_cmp"])
    inputs["k_cmp"][:, 8] = 1000.0  # covers tokens 32 to 40: all of selection block 4, nothing of the others
    ids = select_blocks(torch.ones_like(inputs["q"]), inputs["k_cmp"], SMALL)
    assert ids[0, 63, 0].tolist() == [0, 4, 6, 7]
    assert ids[0, 38, 0].tolist() == [0, 1, 3, 4]


def test_the_highest_score_wins_a_free_slot() -> None:
    inputs = make_inputs(SMALL, Sizes(64, groups=1, heads_per_group=1))
    inputs["k_cmp"] = torch.zeros_like(inputs["k_cmp"])
    for block, strength in ((4, 1.0), (8, 3.0), (6, 2.0)):  # they start selection blocks 2, 4 and 3
        inputs["k_cmp"][:, block] = strength
    ids = select_blocks(torch.ones_like(inputs["q"]), inputs["k_cmp"], SMALL)
    assert ids[0, 63, 0].tolist() == [0, 4, 6, 7]


@pytest.mark.parametrize("group", [0, 1])
def test_a_group_chooses_by_its_own_heads_and_keys(group: int) -> None:
    inputs = make_inputs(SMALL, Sizes(64))
    before = select_blocks(inputs["q"], inputs["k_cmp"], SMALL)
    q, k_cmp = inputs["q"].clone(), inputs["k_cmp"].clone()
    q[:, :, group * 3 : (group + 1) * 3] = torch.randn(1, 64, 3, 4, dtype=torch.float64)
    k_cmp[:, :, group] *= -2
    after = select_blocks(q, k_cmp, SMALL)
    assert torch.equal(after[:, :, 1 - group], before[:, :, 1 - group])
    assert not torch.equal(after[:, :, group], before[:, :, group])


def test_the_weights_of_the_standard_geometry_are_one_two_two_two_one() -> None:
    spec = NSASpec(l=32, d=16, l_sel=64, n_sel=16, w=512)
    matrix = reference.overlap_matrix(spec.compressed_blocks(512), spec.selection_blocks(512), spec, torch.empty(0))
    for j in range(1, 7):
        around = matrix[:, j].nonzero().flatten().tolist()
        assert around == list(range(4 * j - 1, 4 * j + 4))
        assert matrix[around, j].tolist() == [1, 2, 2, 2, 1]


@given(specs(), st.integers(1, 80))
def test_the_overlap_matrix_counts_the_shared_tokens(spec: NSASpec, tokens: int) -> None:
    blocks, columns = spec.compressed_blocks(tokens), spec.selection_blocks(tokens)
    matrix = reference.overlap_matrix(blocks, columns, spec, torch.empty(0, dtype=torch.float64))
    for i in range(blocks):
        covered = set(range(i * spec.d, i * spec.d + spec.l))
        shared = [len(covered & set(range(j * spec.l_sel, (j + 1) * spec.l_sel))) for j in range(columns)]
        assert matrix[i].tolist() == [count / spec.d for count in shared]
        assert [spec.overlap(i, j) for j in range(columns)] == matrix[i].tolist()
