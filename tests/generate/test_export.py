"""The exported folder: what it holds, its tokenizer and model card, and that it gives the same model back."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tamis.config import build_config, load_config
from tamis.data.tokenizer import byte_letters, tokenizer_for
from tamis.generate.export import _merges, _write_tokenizer, export_command
from tamis.generate.load import load_model
from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tests.data.test_tokenizer import write_tokenizer
from tests.generate.test_load import save
from tests.generate.test_sample import PROMPT, small_config, small_model


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export_command(save(tmp_path / "run", small_model()), tmp_path / "folder")


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    _write_tokenizer(folder, tokenizer_for("gpt2"), 1024)
    return folder


def test_the_folder_loads_as_the_same_model(exported: Path) -> None:
    loaded, tokens = load_model(exported, device="cpu"), torch.tensor([PROMPT])
    assert loaded.step == 7
    assert torch.equal(loaded.model(tokens)[0], small_model()(tokens)[0])


def test_the_folder_holds_no_path_of_the_run(exported: Path) -> None:
    described = json.loads((exported / "config.json").read_text())
    assert set(described["tamis"]["train"]) == {"seq_len"}
    assert "out_dir" not in (exported / "config.json").read_text()


def test_a_folder_that_is_not_empty_is_refused_and_not_changed(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already holds something"):
        export_command(tmp_path / "run", exported)
    assert load_model(exported, device="cpu").step == 7


def test_a_folder_that_export_did_not_write_is_refused(exported: Path) -> None:
    (exported / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a folder that `tamis export` wrote"):
        load_model(exported, device="cpu")


def test_the_model_card_tells_data_tokens_loss_and_evaluation_but_no_path(tmp_path: Path) -> None:
    tree = small_config().model_dump()
    tree["data"] |= {"dataset": "local", "local_path": "/secret/place"}
    checkpoint = save(tmp_path / "run", small_model(), config=build_config(tree))
    run = RunDirectory(tmp_path / "run")
    run.val_csv.write_text("step,loss,ppl\n3,9.5,1\n7,3.25,25.8\n")
    run.metrics_json.write_text('{"steps_done": 7, "tokens_seen": 123456}')
    task = {"accuracy": 0.25, "standard_error": 0.01}
    texts = {"README.md": {"step": 7, "bits_per_byte": 4.5}, "old.txt": {"step": 6, "bits_per_byte": 2.5}}
    figures = {"step": 7, "tasks": {"arc|easy": task}, "bits_per_byte": 1.5, "texts": texts}
    run.eval_json.write_text(json.dumps(figures))
    card = (export_command(checkpoint, tmp_path / "folder") / "README.md").read_text()
    for text in (
        "library_name: transformers",
        "local files",
        "123,456",
        "3.2500",
        "arc\\|easy | 0.25 ± 0.01",
        "| bits per byte, held-out text | 1.5000 |",
        "| bits per byte, the text README.md | 4.5000 |",
    ):
        assert text in card
    assert "secret" not in card
    assert "old.txt" not in card
    run.metrics_json.write_text("[")
    run.eval_json.write_text('{"step": 7, "tasks": [1]}')
    assert "123,456" not in (export_command(checkpoint, tmp_path / "again") / "README.md").read_text()


def test_every_byte_has_its_own_printable_letter() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert letters[ord("A")] == "A"
    assert letters[ord(" ")] == "Ġ"


def test_the_merges_rebuild_gpt2_s_own_segmentation() -> None:
    """Byte pairs merged by the exported list, lowest first, give the tokenizer's ids."""
    tokenizer = tokenizer_for("gpt2")
    tokens = [tokenizer.to_bytes([i]) for i in range(2000)]  # the first of the list hold for themselves
    order = {pair: rank for rank, pair in enumerate(_merges(tokens))}
    parts = [bytes([b]) for b in b" the"]
    while any(pair in order for pair in itertools.pairwise(parts)):
        i = min(range(len(parts) - 1), key=lambda i: order.get((parts[i], parts[i + 1]), 10**9))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    assert [tokens.index(part) for part in parts] == tokenizer.encode(" the").tolist()


@pytest.mark.parametrize(
    "text", [" the quick brown fox's 3rd jump", "naïve café — 12,345 €\n\n\tif x:  # 数", "  \u200b🙂 end"]
)
def test_transformers_reads_the_exported_gpt2_tokenizer(gpt2_folder: Path, text: str) -> None:
    from transformers import AutoTokenizer  # here, because every test process loads this file

    theirs, ours = AutoTokenizer.from_pretrained(gpt2_folder), tokenizer_for("gpt2")
    ids = theirs(text)["input_ids"]
    assert ids == ours.encode(text).tolist()
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eot


@pytest.mark.parametrize("kind", ["byte-level", "tiktoken"])
def test_transformers_reads_a_tokenizer_of_ones_own(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    file = write_tokenizer(tmp_path / ("own.tiktoken" if kind == "tiktoken" else "tokenizer.json"), kind)
    ours = tokenizer_for(str(file))
    (folder := tmp_path / "exported").mkdir()
    _write_tokenizer(folder, ours, 1024)
    theirs, text = AutoTokenizer.from_pretrained(folder), "the lazy 数 dog"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.eos_token_id == ours.eot


def test_the_tokenizer_next_to_a_checkpoint_is_used(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    file = write_tokenizer(tmp_path / "own.tiktoken", "tiktoken")
    config = load_config(None, [f"data.tokenizer={file}", "model.dim=64", "model.n_layers=1", "model.d_ff=64"])
    tokenizer = tokenizer_for(str(file))
    checkpoint = save(tmp_path / "run", Decoder(config))
    file.rename(checkpoint.parent / tokenizer.name)
    assert load_model(checkpoint, device="cpu").tokenizer.name == tokenizer.name
    folder = export_command(checkpoint, tmp_path / "folder")
    loaded = load_model(folder, device="cpu")
    assert loaded.tokenizer.encode("a dog").tolist() == tokenizer.encode("a dog").tolist()
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert theirs(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, tokenizer.vocab_size)
    assert str(tmp_path) not in (folder / "README.md").read_text()
