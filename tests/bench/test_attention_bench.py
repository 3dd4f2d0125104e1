"""The attention bench, small and on the CPU: tables first, one JSON line last, and silence where kernels disagree."""

import json

import pytest
import torch

from tests.attention.devices import DEVICE  # isort: skip
from tamis.attention.verify import Check
from tamis.bench import attention

SMALL = ["--shapes", "tiny", "--lengths", "48", "96", "--tokens", "96", "--repeats", "1", "--device", "cpu"]


def test_the_last_line_is_one_json_document_with_every_row(capsys, monkeypatch):
    monkeypatch.setattr(attention.things, "parts", lambda *args: [])  # kernels, and slow in the interpreter
    assert attention.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert document["tflops"] > 0 and document["tb_per_s"] > 0
    names = {(row["name"], row["choices"], row["length"]) for row in document["rows"]}
    assert {("whole", "random", 48), ("whole", "clustered", 96), ("reference", "random", 48)} <= names
    assert {row["batch"] for row in document["rows"] if row["length"] == 48} == {2}
    assert any(line.startswith("whole, clustered") for line in lines[:-1])


def test_the_parts_are_all_the_kernels_of_the_whole():
    shape = attention.SHAPES["tiny"]
    inputs = attention.things.make_inputs(shape, 1, 33, torch.device(DEVICE), torch.float32, clustered=True)
    names = [part.name for part in attention.things.parts(shape, inputs, "random")]
    assert names == ["selected", "compressed", "selection", "window", "gates"]


def test_nothing_is_reported_where_the_kernels_disagree(capsys, monkeypatch):
    monkeypatch.setattr(attention, "verify", lambda *args: [Check("window dq", 0.3, 5e-3)])
    assert attention.main(SMALL) == 1
    output = capsys.readouterr()
    assert "window dq" in output.err and "{" not in output.out


@pytest.mark.parametrize("arguments", [["--shapes", "unknown"], ["--precision", "int8"]])
def test_an_unknown_choice_is_refused(arguments):
    with pytest.raises(SystemExit):
        attention.main(arguments)
