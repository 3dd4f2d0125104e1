"""The decode bench, small enough for a CPU."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tamis.attention import NSASpec
from tamis.bench import decode
from tamis.bench.decode import measure_decoding
from tamis.bench.document import exit_code

SPEC = NSASpec(8, 4, 16, 4, 24)


def run(tmp_path: Path) -> dict:
    return measure_decoding(
        [1, 3], [64, 200], heads=4, groups=2, dim=16, spec=SPEC, repeats=2, device="cpu", out_dir=tmp_path
    )


def test_table_csv_summary_and_the_last_line_hold_the_same_figures(tmp_path: Path, capsys) -> None:
    document = run(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == json.loads(json.dumps(document))
    with open(tmp_path / "decode.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["batch"]), int(r["length"])) for r in rows] == [(1, 64), (3, 64), (1, 200), (3, 200)]
    assert [float(r["nsa_ms"]) for r in rows] == [r["nsa_ms"] for r in document["rows"]]
    assert (tmp_path / "decode_summary.txt").read_text().splitlines() == printed[:-1]


def test_the_document_is_printed_where_the_files_cannot_be_written(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    document = run(tmp_path / "file" / "bench")
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == json.loads(json.dumps(document))
    assert printed.err == f"not written: {tmp_path / 'file' / 'bench'}: Not a directory\n"


def test_an_interrupted_bench_leaves_the_files_of_an_earlier_one(tmp_path: Path, monkeypatch) -> None:
    run(tmp_path)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    rows: list[dict] = []

    def interrupted(*words):
        if rows:
            os.kill(os.getpid(), signal.SIGTERM)
        rows.append({"batch": 1, "length": 64} | dict.fromkeys(decode.COLUMNS[2:], 1))
        return rows[-1]

    monkeypatch.setattr(decode, "measure_row", interrupted)
    document = run(tmp_path)
    assert (len(document["rows"]), exit_code(document)) == (1, 130)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_reads_are_counted_and_compared_with_the_formula(tmp_path: Path) -> None:
    first, _, last, _ = run(tmp_path)["rows"]
    assert first["reads"] == 15 + 64 + 24  # four blocks are all there are at 64 tokens
    assert last["reads"] == 49 + 3 * 16 + 8 + 24  # the newest block holds 8 of its 16 tokens at 200
    assert last["reads_formula"] == SPEC.reads_per_token(200) == 49 + 64 + 24


def test_the_whole_model_s_step_is_measured_for_both_kinds_of_attention(monkeypatch, tmp_path: Path) -> None:
    tiny = decode.build_config

    def small(tree: dict):
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 8, "d_ff": 16}
        return tiny({**tree, "model": {**tree["model"], **sizes}, "data": {"tokenizer": "byte"}})

    monkeypatch.setattr(decode, "build_config", small)
    document = measure_decoding(
        [2], [64], heads=4, dim=16, spec=SPEC, repeats=2, device="cpu", out_dir=tmp_path, with_model=True
    )
    assert document["rows"][0]["step_ms"] > 0
    assert document["rows"][0]["dense_step_ms"] > 0


def test_a_kernel_that_disagrees_is_not_timed(monkeypatch, tmp_path: Path) -> None:
    right = decode.nsa_decode

    def wrong(*args, kernels=None):
        out, ids, reads = right(*args, kernels=False)
        return (out if kernels is False else out * 1.01), ids, reads

    monkeypatch.setattr(decode, "nsa_decode", wrong)
    with pytest.raises(RuntimeError, match="disagrees with the reference by 1"):
        run(tmp_path)
    assert not (tmp_path / "decode.csv").exists()


def test_a_kernel_that_returns_nan_is_not_timed(monkeypatch, tmp_path: Path) -> None:
    right = decode.nsa_decode

    def wrong(*args, kernels=None):
        out, ids, reads = right(*args, kernels=False)
        return (out if kernels is False else torch.full_like(out, float("nan"))), ids, reads

    monkeypatch.setattr(decode, "nsa_decode", wrong)
    with pytest.raises(RuntimeError, match="disagrees"):
        run(tmp_path)
