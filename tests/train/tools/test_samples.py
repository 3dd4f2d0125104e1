"""Samples while training: fixed openings, bounded time, and a failure that ends nothing."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import Sample, SampleLog
from tamis.train.tools import samples
from tamis.train.tools.samples import SampleWriter, continue_openings, held_out_openings
from tests.model.tiny import tiny_config, tiny_model

EOT = 256
BATCHES = [np.frombuffer(b"." + b"abcdefghijklmnopqrstuvwxyz" * 6, np.uint8)[:146].astype(np.int32).reshape(2, 73)]


def writer(tmp_path: Path, *keys: str) -> tuple[SampleWriter, Decoder]:
    model = tiny_model()
    return SampleWriter(tiny_config("train.steps=10", *keys), RunDirectory(tmp_path), model, None), model


def test_openings_are_those_of_documents_or_of_rows_where_none_begins() -> None:
    assert held_out_openings(BATCHES, EOT, 2, 3).tolist() == [list(b".ab"), list(BATCHES[0][1, :3])]
    batches = [BATCHES[0].copy()]
    batches[0][0, 5], batches[0][1, 70] = EOT, EOT
    assert held_out_openings(batches, EOT, 3, 3).tolist() == [[EOT, *b"fg"]]  # the other one ends too soon
    assert held_out_openings(batches, EOT, 3, 2).tolist() == [[EOT, *b"f"], [EOT, batches[0][1, 71]]]


def test_each_token_is_sampled_after_all_tokens_before_it() -> None:
    model, openings = tiny_model(), held_out_openings(BATCHES, EOT, 2, 7)
    found = continue_openings(model, openings, 9, seed=3, deadline=time.monotonic() + 100)
    assert found == continue_openings(model, openings, 9, seed=3, deadline=time.monotonic() + 100)
    generator, tokens = torch.Generator().manual_seed(3), torch.from_numpy(openings).long()
    for _ in range(9):
        with torch.no_grad():
            logits = model.logits(model(tokens)[0][:, -1])
        p = (logits / samples.TEMPERATURE).softmax(dim=-1)
        tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=generator)), dim=1)
    assert tokens[:, 7:].tolist() == found


def test_time_is_bounded_but_the_last_step_always_has_a_sample(tmp_path: Path) -> None:
    write, _ = writer(tmp_path)
    write.spent_s = 1e9  # as after a slow first compilation
    assert write.write(5, BATCHES) == []
    assert len(write.write(10, BATCHES)) == 2
    assert continue_openings(tiny_model(), held_out_openings(BATCHES, EOT, 2, 7), 9, 0, deadline=0.0) == [[], []]
    assert write.write(10, []) == []
    off, _ = writer(tmp_path, "train.samples=0")
    assert off.write(10, BATCHES) == []


def test_a_failing_sample_is_reported_once_and_turns_them_off(tmp_path: Path, capsys, monkeypatch) -> None:
    write, model = writer(tmp_path)
    monkeypatch.setattr(model, "step", lambda *_: 1 / 0)
    assert write.write(10, BATCHES) == []
    assert write.write(10, BATCHES) == []
    assert capsys.readouterr().out.count("no samples from here on: ZeroDivisionError") == 1


def test_a_resume_keeps_earlier_samples_and_odd_lines_are_skipped(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    assert log.read() == []
    log.append([Sample(step, "a\n", f"é{step}") for step in (2, 4, 6)])
    with open(log.path, "a") as file:
        file.write('[]\n{"step": true, "prompt": "", "text": ""}\n{"step": 7}\nhalf')
    assert [sample.step for sample in log.read()] == [2, 4, 6]
    log.resume_at(4)
    assert log.read() == [Sample(2, "a\n", "é2"), Sample(4, "a\n", "é4")]
