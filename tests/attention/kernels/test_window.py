"""The window branch's kernels against the reference."""

import pytest
import torch

from tests.attention.devices import DEVICE, DTYPES, branch_against_reference, poisoned_memory, random_inputs  # isort: skip
from tamis.attention import NSASpec
from tamis.attention.kernels.window import sliding_window
from tamis.attention.packing import PackedRow
from tamis.model.window import chunked_window_attention

# With one key taking nearly all weight, `dP − delta` cancels while `delta` comes from an output rounded to 8 bits.
SLACK_OF_LARGE_LOGITS = 2.0
__all__ = ["poisoned_memory"]


def check(window, dtype, slack=1.0, **shape):
    spec = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=window)
    q, _, _, _, _, k, v, gates = random_inputs(spec, dtype=dtype, **shape)
    return branch_against_reference("window", q, k, v, gates, spec, slack=slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "tokens", "groups", "heads_per_group", "dim", "batch"),
    [(24, 43, 2, 6, 16, 1), (40, 77, 1, 1, 16, 2), (9, 30, 1, 16, 24, 1), (1, 20, 1, 2, 16, 1), (512, 37, 1, 2, 16, 1)],
    ids=["group of 6", "one head", "group of 16, dim padded", "itself alone", "wider than the sequence"],
)
def test_agrees_with_the_reference(poisoned_memory, dtype, window, tokens, groups, heads_per_group, dim, batch):
    shape = {"tokens": tokens, "groups": groups, "heads_per_group": heads_per_group, "dim": dim, "batch": batch}
    check(window, dtype, **shape)


def test_one_token_sees_itself(poisoned_memory):
    _, lse = check(24, DTYPES[0], tokens=1)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_stay_finite_and_right(poisoned_memory, dtype):
    check(12, dtype, tokens=29, scale=30.0, slack=SLACK_OF_LARGE_LOGITS)


@pytest.mark.parametrize("lengths", [[45], [13, 1, 31]], ids=["one sequence", "packed"])
def test_the_window_alone_equals_masked_attention(poisoned_memory, lengths):
    spec, tokens = NSASpec(w=12), sum(lengths)
    q, _, _, k, v, *_ = random_inputs(spec, tokens=tokens, groups=1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = ends.int().to(DEVICE) if len(lengths) > 1 else None
    row = None if cu_seqlens is None else PackedRow.of(cu_seqlens, tokens, spec)
    outs = sliding_window(q, k, v, 12, row), chunked_window_attention(q, k, v, 12, cu_seqlens)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in outs]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
