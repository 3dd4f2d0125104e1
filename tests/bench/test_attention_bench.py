"""The attention bench, small and on the CPU: tables first, then the document, and silence where kernels disagree."""

import json

import pytest
import torch

from tests.attention.devices import DEVICE  # isort: skip
from tamis.attention.agreement import Check
from tamis.bench import attention

SMALL = {"shapes": ("tiny",), "lengths": (48, 96), "tokens": 96, "repeats": 1, "device": "cpu"}


def test_tables_come_first_and_the_document_holds_every_row(capsys, monkeypatch):
    monkeypatch.setattr(attention.branches, "parts", lambda *args: [])  # kernels, and slow in the interpreter
    document = json.loads(json.dumps(attention.measure_attention(**SMALL)))
    assert document["tflops"] > 0 and document["tb_per_s"] > 0
    names = {(row["name"], row["choices"], row["length"]) for row in document["rows"]}
    assert {("whole", "random", 48), ("whole", "clustered", 96), ("reference", "random", 48)} <= names
    assert {row["batch"] for row in document["rows"] if row["length"] == 48} == {2}
    assert {row["tokens"] for row in document["rows"]} == {96}
    printed = capsys.readouterr().out
    assert "measured here: 0 TFLOP/s" not in printed
    assert f"measured here: {document['tflops']:.4g} TFLOP/s" in printed
    assert any(line.startswith("whole, clustered") for line in printed.splitlines())
    assert "in place of" not in printed


def test_the_parts_are_all_the_kernels_of_the_whole():
    shape = attention.SHAPES["tiny"]
    inputs = attention.branches.make_inputs(shape, 1, 33, torch.device(DEVICE), torch.float32, clustered=True)
    names = [part.name for part in attention.branches.parts(shape, inputs, "random")]
    assert names == ["selected", "compressed", "selection", "window", "dense dq", "gates"]


def test_nothing_is_reported_where_the_kernels_disagree(capsys, monkeypatch):
    monkeypatch.setattr(attention, "verify", lambda *args: [Check("window dq", 0.3, 5e-3)])
    with pytest.raises(attention.Disagreement, match="window dq"):
        attention.measure_attention(**SMALL)
    assert "whole" not in capsys.readouterr().out


def test_graphs_are_refused_without_a_gpu():
    with pytest.raises(ValueError, match="leave --graph out"):
        attention.measure_attention(**SMALL, graph=True)
