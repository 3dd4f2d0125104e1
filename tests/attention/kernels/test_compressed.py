"""The compressed branch's kernels against the reference: outputs, empty rows, gradients."""

import pytest
import torch

from tests.attention.devices import DTYPES, branch_against_reference, poisoned_memory, random_inputs  # isort: skip
from tamis.attention import NSASpec

SMALL = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
# With one key taking nearly all weight, `dP − delta` cancels while `delta` comes from an output rounded to 8 bits.
SLACK_OF_LARGE_LOGITS = 2.0
__all__ = ["poisoned_memory"]


def check(spec, dtype, slack=1.0, **shape):
    q, k, v, *_, gates = random_inputs(spec, dtype=dtype, **shape)
    return branch_against_reference("compressed", q, k, v, gates, spec, slack=slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "groups", "heads_per_group", "dim", "batch"),
    [(43, 2, 6, 16, 1), (70, 1, 1, 16, 2), (33, 1, 16, 24, 1)],
    ids=["group of 6", "one head", "group of 16, dim padded"],
)
def test_agrees_with_the_reference(poisoned_memory, dtype, tokens, groups, heads_per_group, dim, batch):
    shape = {"tokens": tokens, "groups": groups, "heads_per_group": heads_per_group, "dim": dim, "batch": batch}
    check(SMALL, dtype, **shape)


def test_long_keys_are_split_and_summed(poisoned_memory):
    """Enough rows per tile of keys that several programs share it."""
    check(NSASpec(l=2, d=1, l_sel=4, n_sel=3, w=4), DTYPES[0], tokens=75, groups=1, heads_per_group=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_no_block_gives_exactly_zero(poisoned_memory, dtype):
    out, lse = check(SMALL, dtype, tokens=21)
    assert (out[:, : SMALL.l - 1] == 0).all()
    assert (lse[..., : SMALL.l - 1] == float("-inf")).all()
    assert torch.isfinite(lse[..., SMALL.l - 1 :]).all()


def test_a_sequence_shorter_than_a_block_gives_zeros_and_empty_gradients(poisoned_memory):
    out, lse = check(SMALL, DTYPES[0], tokens=SMALL.l - 3)
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_stay_finite_and_right(poisoned_memory, dtype):
    check(SMALL, dtype, tokens=29, scale=30.0, slack=SLACK_OF_LARGE_LOGITS)
