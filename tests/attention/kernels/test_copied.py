"""The dense branches with tiles copied by the tensor memory accelerator, against the reference.

On a GPU that has one these are the shapes that take it; in the interpreter, which copies any shape, it is asked for.
"""

import pytest
import torch

from tests.attention.devices import DEVICE, branch_against_reference, poisoned_memory, random_inputs  # isort: skip
from tamis.attention import NSASpec, op
from tamis.attention.kernels import selection
from tamis.attention.kernels.banded import keys as banded_keys
from tamis.attention.kernels.banded import queries as banded_queries
from tamis.attention.kernels.launch import copies_tiles

__all__ = ["poisoned_memory"]
SPEC = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BRANCHES = ("compressed", "window")


@pytest.fixture
def copied_rows(monkeypatch):
    """Tiles of keys are copied; the returned list tells for every backward pass whether tiles of rows were."""
    if ON_GPU and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor memory accelerator")
    if not ON_GPU:
        for module in (banded_queries, banded_keys, selection):
            monkeypatch.setattr(module, "copies_tiles", lambda heads, *tensors: all(x.numel() > 0 for x in tensors))
    seen, decide = [], banded_keys.copies_rows
    monkeypatch.setattr(banded_keys, "copies_rows", lambda *args: seen.append(decide(*args)) or seen[-1])
    return seen


def check(branch, q_of=lambda q: q, gates_of=lambda gates: gates, **shape):
    q, k_cmp, v_cmp, _, _, k_win, v_win, gates = random_inputs(SPEC, dtype=DTYPE, dim=128 if ON_GPU else 16, **shape)
    k, v = (k_cmp, v_cmp) if branch == "compressed" else (k_win, v_win)
    return branch_against_reference(branch, q_of(q.detach()), k, v, gates_of(gates.detach()), SPEC)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("tokens", "groups", "heads_per_group", "batch"),
    [(43, 1, 16, 1), (38, 2, 4, 2), (61, 1, 8, 2), (1, 2, 4, 1)],
    ids=["group of 16", "two sequences", "odd length, two sequences", "one token"],
)
def test_agrees_with_the_reference(poisoned_memory, copied_rows, branch, tokens, groups, heads_per_group, batch):
    check(branch, tokens=tokens, groups=groups, heads_per_group=heads_per_group, batch=batch)
    no_keys = branch == "compressed" and tokens < SPEC.l
    assert copied_rows == ([] if no_keys else [True])


@pytest.mark.parametrize(
    ("tokens", "batch", "programs"), [(150, 1, 1024), (133, 2, 6)], ids=["empty splits", "few splits"]
)
def test_programs_of_many_keys_walk_the_same_rows(poisoned_memory, copied_rows, monkeypatch, tokens, batch, programs):
    monkeypatch.setattr(banded_keys, "MANY_KEYS", 1)
    monkeypatch.setattr(banded_keys, "PROGRAMS_WANTED", programs)
    check("compressed", tokens=tokens, groups=1, heads_per_group=4, batch=batch)
    assert copied_rows == [True]


@pytest.mark.parametrize("branch", BRANCHES)
def test_gates_may_be_negative_or_zero(poisoned_memory, copied_rows, branch):
    check(branch, gates_of=lambda x: torch.where(x < 0.4, 0.0, x - 0.6), tokens=37, groups=1, heads_per_group=4)
    assert copied_rows == [True]


@pytest.mark.parametrize("heads_per_group", [1, 2, 6])
def test_rows_that_are_no_whole_tokens_are_read_while_keys_are_copied(poisoned_memory, copied_rows, heads_per_group):
    check("window", tokens=29, groups=2, heads_per_group=heads_per_group)
    assert copied_rows == [False]


def test_sequences_that_lie_apart_are_read(poisoned_memory, copied_rows):
    def apart(q):
        roomy = torch.full((q.shape[0], q.shape[1] + 3, *q.shape[2:]), float("nan"), dtype=q.dtype, device=q.device)
        roomy[:, : q.shape[1]] = q
        return roomy[:, : q.shape[1]]

    check("window", q_of=apart, tokens=21, groups=1, heads_per_group=4, batch=2)
    assert copied_rows == [False]


@pytest.mark.parametrize(("heads_per_group", "batch"), [(3, 2), (16, 1)])
def test_blocks_are_chosen_as_with_keys_that_are_read(
    poisoned_memory, copied_rows, monkeypatch, heads_per_group, batch
):
    shape = {"tokens": 190, "heads_per_group": heads_per_group, "batch": batch, "dim": 128 if ON_GPU else 16}
    q, k, v, *_ = (x.detach() for x in random_inputs(SPEC, dtype=DTYPE, **shape))
    _, lse = op.compressed_forward(q, k, v, SPEC)
    copied = selection.select_from_lse(q, k, lse, SPEC)
    monkeypatch.setattr(selection, "copies_tiles", lambda *args: False)
    assert torch.equal(copied, selection.select_from_lse(q, k, lse, SPEC))


def test_only_hopper_at_dim_128_in_half_precision_copies():
    def keys(dim=128, dtype=torch.bfloat16, tokens=4):
        return torch.empty(1, tokens, 2, dim, dtype=dtype)

    assert copies_tiles(16, keys(), keys(dtype=torch.float16))  # a CPU's tensors count as Hopper's
    others = (keys(64), keys(96), keys(256), keys(dtype=torch.float32), keys(tokens=0))
    assert not any(copies_tiles(16, keys(), x) for x in others)
    assert not copies_tiles(6, keys()), "a tile of rows would be no whole tokens"
    assert not copies_tiles(16, torch.empty(1, 4, 2, 129, dtype=torch.bfloat16)[..., :128]), "rows begin anywhere"
    assert not copies_tiles(16, torch.empty(1025, dtype=torch.bfloat16)[1:].view(1, 4, 2, 128)), "so does the first"
