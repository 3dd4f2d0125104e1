"""The long-context demonstration, small enough for a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tamis.generate.demo import demo_64k, measure_prefill_and_decode
from tests.generate.test_load import save
from tests.generate.test_sample import small_model

ROOT = Path(__file__).parents[2]
SMALL = ["model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.d_k=8", "model.d_ff=32", "data.tokenizer=byte"]


def test_the_runbook_s_command_reads_by_tiles_counts_its_reads_and_keeps_a_log(tmp_path: Path) -> None:
    line = "--S 2048 --prefill_tile 700 --rope_scale 8.0 --use_fa2 1 --decode_tokens 3 --device cpu"
    command = [sys.executable, str(ROOT / "scripts" / "demo_64k.py"), *line.split(), *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "freshly initialised" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    nsa, dense = report["models"]
    assert len(nsa["prefill_ms_by_tile"]) == 3
    assert nsa["reads_total"] == 127 + 1024 + 512 == nsa["reads_formula"]
    assert nsa["reads_last_step"] == 127 + 15 * 64 + 3 + 512  # the newest block holds three tokens
    assert dense["reads_total"] == 2048
    assert report["rope_scale"] == 8.0
    (log,) = (tmp_path / "artifacts" / "test-reports").glob("long_context_*.log")
    assert json.loads(log.read_text()) == report


def test_a_checkpoint_s_weights_are_used_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the log goes
    checkpoint = str(save(tmp_path, small_model()))
    nsa, _ = demo_64k(S=50, prefill_tile=20, decode_tokens=2, checkpoint=checkpoint, device="cpu")
    assert "checkpoint_step7.pt, step 7" in capsys.readouterr().out
    assert nsa.reads_total <= nsa.reads_formula


def test_the_formula_counts_no_more_tokens_than_the_cache_holds() -> None:
    result = measure_prefill_and_decode(
        small_model(), torch.arange(20)[None], tile=20, decode_tokens=1
    )  # four blocks of 8 hold 32
    assert result.reads_formula == result.reads_total


def test_the_demo_measures_a_real_prefill(capsys: pytest.CaptureFixture) -> None:
    model, tokens = small_model(), torch.arange(60)[None]
    seen = []
    extend = model.extend
    model.extend = lambda part, cache: seen.append(part) or extend(part, cache)  # type: ignore[method-assign]
    result = measure_prefill_and_decode(model, tokens, tile=25, decode_tokens=4)
    assert torch.equal(torch.cat(seen, dim=1), tokens)
    assert result.cache_mib > 0


@pytest.mark.parametrize("wrong", [{"S": 0}, {"prefill_tile": 0}, {"decode_tokens": 0}])
def test_a_flag_out_of_range_is_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        demo_64k(**wrong)
