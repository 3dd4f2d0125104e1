"""Which blocks the unions of the selected branch hold, and how its last kernel mixes the branches."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch

from tests.attention.devices import DEVICE, DTYPES

# After devices, which sets up the interpreter.
from tamis.attention.kernels.gates import Mixture  # isort: skip
from tamis.attention.kernels.selected import pairs, union  # isort: skip
from tamis.attention.packing import PackedRow, PackedTables  # isort: skip
from tamis.attention.spec import NSASpec  # isort: skip
from tests.attention.kernels.test_selected import Case, random_ids  # isort: skip


def test_every_choice_is_in_a_union_or_left_once_and_forced_blocks_are_never_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(union, "WORTHWHILE", 0.0)  # every union is too long
    case = Case(tokens=200, groups=2, batch=2)
    tile = 8  # divides a block: all tokens of a tile have the same forced ones
    unions = union.unite_choices(case.ids, case.spec, tile, every_tile=False)
    assert unions.rest is not None
    blocks, bits, used = unions.blocks.tolist(), unions.tokens.tolist(), unions.counts[..., 0].tolist()
    for b, s, g in itertools.product(range(2), range(200), range(2)):
        count = used[b][g][s // tile]
        of_tile = zip(blocks[b][g][s // tile][:count], bits[b][g][s // tile][:count], strict=True)
        walked = [block // case.spec.l_sel for block, tokens in of_tile if tokens >> s % tile & 1]
        left, chosen = ([x for x in ids[b, s, g].tolist() if x >= 0] for ids in (unions.rest, case.ids))
        newest = s // case.spec.l_sel
        assert walked == sorted({0, max(0, newest - 1), newest})
        assert sorted(walked + left) == chosen and left == sorted(left)
        assert (unions.rest[b, s, g, len(left) :] == -1).all()


@pytest.mark.parametrize("tile", [5, 32, 64])  # a word of 32 bits, its sign, and a word of 64
@pytest.mark.parametrize("lengths", [(1400,), (700, 33, 1, 650)], ids=["one document", "packed"])
def test_unions_hold_every_choice_once_in_order_with_the_tokens_that_made_it(
    lengths: tuple[int, ...], tile: int
) -> None:
    """Blocks have numbers up to 89, far apart, so that they are collected in several steps."""
    spec, tokens = NSASpec(l=8, d=4, l_sel=16, n_sel=5, w=24), sum(lengths)
    documents = list(torch.tensor([0, *lengths]).cumsum(0))
    row = PackedRow.of(torch.stack(documents).int().to(DEVICE), tokens, spec) if len(lengths) > 1 else None
    packed = row and PackedTables.of(row.flat, len(lengths), tokens, max(lengths), spec)
    ids, begins = [], []
    for n, document in zip(lengths, documents, strict=False):
        chosen = random_ids(spec, 1, n, 2, torch.Generator().manual_seed(n))
        ids.append(chosen.where(chosen < 0, chosen + len(begins)))
        begins += [int(document) + block * spec.l_sel for block in range(spec.selection_blocks(n))]
    ids_BSGn = torch.cat(ids, dim=1)
    unions = union.unite_choices(ids_BSGn.to(DEVICE), spec, tile, every_tile=True, packed=packed)
    for g, i in itertools.product(range(2), range(-(-tokens // tile))):
        choices = ids_BSGn[0, i * tile : (i + 1) * tile, g].tolist()
        words = {
            begins[block]: sum(1 << t for t, chosen in enumerate(choices) if block in chosen)
            for block in sorted({block for chosen in choices for block in chosen if block >= 0})
        }
        used, whole = unions.counts[0, g, i].tolist()
        assert unions.blocks[0, g, i, :used].tolist() == list(words)
        assert [word % 2**64 for word in unions.tokens[0, g, i, :used].tolist()] == list(words.values())
        assert whole == sum(begin + spec.l_sel <= i * tile + 1 for begin in words)


@pytest.mark.parametrize("tokens, dim", [(60, 16), (200, 16), (200, 128)], ids=["unions", "joins", "a kernel alone"])
def test_the_mixed_output_is_the_gated_sum_of_the_branches(tokens: int, dim: int) -> None:
    case = Case(tokens=tokens, groups=2, heads=3, dim=dim, dtype=DTYPES[0])
    waits: list[int] = []
    cmp, win, out = torch.randn_like(case.q), torch.randn_like(case.q), torch.full_like(case.q, torch.nan)
    mixture = Mixture(out, case.gates, cmp, win, lambda: waits.append(1))
    with patch.object(pairs, "DENSE_UP_TO", 1):
        sel, _ = pairs.selected_forward(case.q, case.k, case.v, case.ids, case.spec, mixture=mixture)
    gates, branches = case.gates.float(), torch.stack((cmp, sel, win), dim=-1).float()
    torch.testing.assert_close(out, (gates[..., None, :] * branches).sum(dim=-1).to(out.dtype), rtol=1e-2, atol=1e-5)
    assert waits == [1]
