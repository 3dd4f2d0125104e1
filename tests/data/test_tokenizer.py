"""Both tokenizers give text back as it was, and no text can forge an end-of-text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.config import VOCABULARY
from tamis.data import DataError, tokenizer_for
from tamis.data.tokenizer import with_end_of_text

NAMES = ("gpt2", "byte")


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
        tokenizer.Gpt2Tokenizer()
