"""Selection health separates learned, random and collapsed choices, and reaches the heartbeat."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tamis.train.selection import choice_statistics, selection_statistics
from tests.model.tiny import tiny_config as tiny_model_config
from tests.train.processes import run_ranks, tiny_config, train_rank

SPEC = NSASpec(l=8, d=4, l_sel=8, n_sel=7, w=16)
TOKENS = 512


def ids_from(scores_SN: Tensor) -> Tensor:
    """Select blocks by the given scores as NSA does: block 0, the two newest, then the best of the others."""
    newest = torch.arange(TOKENS)[:, None] // SPEC.l_sel
    blocks = torch.arange(TOKENS // SPEC.l_sel)[None]
    is_forced = (blocks == 0) | ((blocks <= newest) & (blocks >= newest - 1))
    scores = scores_SN.masked_fill(blocks > newest, -math.inf).masked_fill(is_forced, math.inf)
    top = scores.topk(SPEC.n_sel, dim=-1)
    ids = torch.where(top.values == -math.inf, -1, top.indices)
    return ids[None, :, None].int()


def test_random_choices_cover_all_blocks_evenly_and_neighbours_agree_no_more_than_by_chance() -> None:
    torch.manual_seed(0)
    distinct, distance, likeness = choice_statistics(ids_from(torch.rand(TOKENS, 64)), SPEC).tolist()
    assert distinct > 0.98 and distance == pytest.approx(0.5, abs=0.05) and likeness == pytest.approx(0.0, abs=0.05)


def test_collapsed_choices_are_few_and_the_same_for_every_query() -> None:
    always_oldest = -torch.arange(64.0).expand(TOKENS, 64)
    distinct, distance, likeness = choice_statistics(ids_from(always_oldest), SPEC).tolist()
    assert distinct == pytest.approx(4 / 30) and distance > 0.9 and likeness == pytest.approx(1.0)


def test_choices_that_follow_the_text_are_alike_for_neighbours_and_cover_many_blocks() -> None:
    torch.manual_seed(0)
    per_block = torch.rand(TOKENS // 8, 64).repeat_interleave(8, dim=0)  # eight neighbours choose alike
    distinct, _, likeness = choice_statistics(ids_from(per_block), SPEC).tolist()
    assert distinct > 0.9 and likeness == pytest.approx(1.0)


def test_without_more_blocks_than_choices_there_is_no_figure() -> None:
    all_blocks = torch.arange(64).expand(1, TOKENS, 1, 64)
    ids = torch.where(all_blocks <= torch.arange(TOKENS)[None, :, None, None] // 8, all_blocks, -1)
    assert choice_statistics(ids, NSASpec(l=8, d=4, l_sel=8, n_sel=64, w=16)).isnan().all()


@pytest.mark.parametrize("layers", ["nsa", "[nsa, window]"])
def test_every_nsa_layer_has_its_figures(layers: str) -> None:
    config = tiny_model_config("runtime.precision=fp32", "train.seq_len=256", f"nsa.layers={layers}")
    torch.manual_seed(0)
    found = selection_statistics(Decoder(config), torch.randint(config.vocab_size, (1, 256)))
    assert found.shape == (config.layer_kinds.count("nsa"), 3)


def test_of_packed_documents_the_longest_is_measured_as_if_it_were_alone() -> None:
    config = tiny_model_config("runtime.precision=fp32", "train.seq_len=300", "nsa.n_sel=4")
    torch.manual_seed(0)
    decoder, tokens = Decoder(config), torch.randint(config.vocab_size, (1, 300))
    cu_seqlens = torch.tensor([0, 21, 277, 300, 300], dtype=torch.int32)
    packed, alone = selection_statistics(decoder, tokens, cu_seqlens), selection_statistics(decoder, tokens[:, 21:277])
    torch.testing.assert_close(packed, alone)
    assert alone.isfinite().all()


def test_a_run_records_the_figures_of_its_last_step_in_the_heartbeat(tmp_path: Path) -> None:
    keys = ["train.steps=3", "train.seq_len=512", "nsa.n_sel=4", "nsa.l_sel=32", "model.n_layers=3"]
    config = tiny_config(tmp_path / "run", *keys, "nsa.layers=[nsa, window]")
    run_ranks(tmp_path / "logs", 1, train_rank, config)
    beats = read_heartbeats(RunDirectory(config.train.out_dir).heartbeat(0))
    ends = [beat for beat in beats if beat.phase == "step_end"]
    assert [beat.selection_distinct is None for beat in ends] == [True, True, False]
    distinct, distance, likeness = ends[-1].selection_distinct, ends[-1].selection_distance, ends[-1].selection_likeness
    assert all(len(figures or []) == 2 for figures in (distinct, distance, likeness, ends[-1].gate_entropy))
    assert all(0 < share <= 1 for share in distinct or [])
