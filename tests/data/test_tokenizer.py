"""All tokenizers give text back as it was, and no text can forge an end-of-text."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tamis.config import VOCABULARY, ConfigError, load_config
from tamis.data import DataError, tokenizer_for
from tamis.data.tokenizer import GPT2_RANKS, TiktokenTokenizer, with_end_of_text

NAMES = ("gpt2", "byte")
TEXTS = ["Hello world, café 数 🙂\n\n  end", "one<|endoftext|>two", ""]


def write_tokenizer(path: Path, kind: str) -> Path:
    """Write a small tokenizer file: byte-level pairs, pieces in SentencePiece's manner, or tiktoken ranks."""
    if kind == "tiktoken":
        path.write_bytes(b"\n".join(GPT2_RANKS.read_bytes().splitlines()[:600]))
        return path
    corpus = ["the quick brown fox jumps over the lazy dog"] * 9
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=letters)
    else:
        made = Tokenizer(models.BPE(byte_fallback=True))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["</s>", *bytes_of])
    made.train_from_iterator(corpus, trainer)
    made.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["byte-level", "pieces", "tiktoken"])
def test_a_file_of_ones_own_gives_text_back_and_ends_documents_with_its_last_token(tmp_path, kind):
    file = write_tokenizer(tmp_path / ("own.tiktoken" if kind == "tiktoken" else "tokenizer.json"), kind)
    config = load_config(None, [f"data.tokenizer={file}"])
    tokenizer = tokenizer_for(str(file))
    assert config.vocab_size == tokenizer.vocab_size == tokenizer.eot + 1
    for text in TEXTS:
        ids = with_end_of_text(tokenizer, text).tolist()
        assert tokenizer.eot not in ids[1:]
        assert tokenizer.decode(ids[1:]).strip() == text.strip()
    if kind != "tiktoken":
        assert tokenizer_for(str(tmp_path)).name == tokenizer.name  # the folder that holds it


def test_a_tokenizer_that_cannot_be_read_names_the_key(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*tokenizer\.json cannot be read"):
        load_config(None, [f"data.tokenizer={tmp_path}"])
    with pytest.raises(ConfigError, match=r"data\.tokenizer is 'bert': it must be gpt2, byte"):
        load_config(None, ["data.tokenizer=bert"])
    with pytest.raises(ConfigError, match=r"data\.vocab_size must be null or 257"):
        load_config(None, ["data.tokenizer=byte", "data.vocab_size=300"])


def test_a_vocabulary_beyond_16_bits_keeps_every_id(tmp_path):
    wide = {bytes([byte]): byte for byte in range(256)} | {b"xy": 70_000}
    ids = with_end_of_text(TiktokenTokenizer(wide, "wide"), "xy")
    assert (ids.tolist(), ids.dtype) == ([70_001, 70_000], np.uint32)


def test_gpt2_tokens_are_those_of_gpt2():
    assert tokenizer_for("gpt2").encode("Hello world").tolist() == [15496, 995]
    assert tokenizer_for("gpt2").eot == 50256


def test_byte_tokens_are_the_utf8_bytes():
    assert tokenizer_for("byte").encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer_for("byte").eot == 256


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_and_stays_within_the_vocabulary(name, text):
    tokenizer = tokenizer_for(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert all(i < tokenizer.eot for i in ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_cannot_forge_its_end(name):
    tokenizer = tokenizer_for(name)
    ids = with_end_of_text(tokenizer, "one<|endoftext|>two").tolist()
    assert ids[0] == tokenizer.eot
    assert tokenizer.eot not in ids[1:]


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_is_the_one_the_configuration_names(name):
    assert tokenizer_for(name).vocab_size == VOCABULARY[name] == tokenizer_for(name).eot + 1


@pytest.mark.parametrize("name", NAMES)
def test_end_of_text_decodes_to_its_mark(name):
    tokenizer = tokenizer_for(name)
    assert tokenizer.decode(with_end_of_text(tokenizer, "hi").tolist()) == "<|endoftext|>hi"


def test_an_unknown_tokenizer_names_the_key():
    with pytest.raises(DataError, match=r"data\.tokenizer"):
        tokenizer_for("bert")


def test_damaged_ranks_are_detected(tmp_path, monkeypatch):
    from tamis.data import tokenizer

    damaged = tmp_path / "r50k_base.tiktoken"
    damaged.write_bytes(tokenizer.GPT2_RANKS.read_bytes().replace(b" 7\n", b" 8\n", 1))
    monkeypatch.setattr(tokenizer, "GPT2_RANKS", damaged)
    with pytest.raises(DataError, match="damaged"):
        tokenizer.tokenizer_for.__wrapped__("gpt2")  # without the cache
