"""Generation: the tokens drawn, their streaming as text, and the refusal of bad prompts."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.config import Config, build_config
from tamis.data.tokenizer import tokenizer_for
from tamis.generate import Sampling, generate, generate_text, generate_texts
from tamis.generate.sample import choose, gather_prompts
from tamis.model import Decoder

PROMPT = list(b"The state of the Union")


def small_config(attention: str = "nsa", head_dim: int = 8) -> Config:
    heads = {"n_heads": 4, "n_kv_groups": 2, "d_k": head_dim}
    model = {"dim": 24, "n_layers": 2, "d_ff": 32, "attention": attention, **heads}
    nsa = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 12}
    return build_config({"model": model, "nsa": nsa, "data": {"tokenizer": "byte"}, "train": {"seq_len": 96}})


def small_model(attention: str = "nsa") -> Decoder:
    torch.manual_seed(0)
    return Decoder(small_config(attention))


def tokens_of(steps) -> list[list[int]]:
    return [list(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_greedy_generation_equals_repeated_whole_passes(attention: str) -> None:
    model, sequence = small_model(attention), list(PROMPT)
    for _ in range(30):
        hidden = model(torch.tensor([sequence]))[0]
        sequence.append(int(model.logits(hidden[0, -1]).argmax()))
    got = tokens_of(generate(model, [PROMPT], 30, Sampling(temperature=0), prefill_tile=5))
    assert got == [sequence[len(PROMPT) :]]


def test_a_prompt_gives_the_same_text_alone_and_in_a_batch() -> None:
    model, tokenizer, sampling = small_model(), tokenizer_for("byte"), Sampling(seed=5)
    prompts = ["a", "The Congress", "peace and plenty, "]
    together = ["".join(parts) for parts in zip(*generate_texts(model, tokenizer, prompts, 20, sampling), strict=True)]
    for prompt, text in zip(prompts, together, strict=True):
        assert "".join(generate_text(model, tokenizer, prompt, 20, seed=5)) == text


def test_the_seed_decides_the_text() -> None:
    model = small_model()
    first, again, other = (tokens_of(generate(model, [PROMPT], 25, Sampling(seed=s))) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_generation_ends_after_the_stop_token_of_each_prompt() -> None:
    model, prompts = small_model(), [PROMPT, list(b"War")]
    free = tokens_of(generate(model, prompts, 40, Sampling(seed=3)))
    stop = free[0][10]
    stopped = tokens_of(generate(model, prompts, 40, Sampling(seed=3), stop_token=stop))
    for tokens, expected in zip(stopped, free, strict=True):
        end = expected.index(stop) + 1 if stop in expected else len(expected)
        given_tokens = [token for token in tokens if token is not None]
        assert given_tokens == expected[:end]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1),
    uniform=st.floats(0, 1, exclude_max=True, width=32),
)
def test_only_tokens_of_the_top_k_and_the_nucleus_are_sampled(seed, temperature, top_k, top_p, uniform) -> None:
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(seed)) * 3
    token = int(choose(logits, torch.tensor([uniform]), Sampling(temperature, top_k, top_p)))
    p = (logits[0] / temperature).softmax(-1)
    likelier = p[p > p[token]]
    assert len(likelier) < (top_k or 10)
    assert likelier.sum() < top_p + 1e-5


def test_samples_follow_the_model_s_probabilities() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    drawn = choose(logits.expand(10_000, 4), uniform, Sampling(temperature=0.7))
    frequency = torch.bincount(drawn, minlength=4) / 10_000
    torch.testing.assert_close(frequency, (logits / 0.7).softmax(-1), atol=2e-4, rtol=0)


class Scripted:
    """A tokenizer of raw bytes whose model is replaced by a script."""

    def __init__(self, script: list[int]) -> None:
        self.script = script

    def steps(self, *args, **kwargs):
        return ([token] for token in self.script)


def stream(monkeypatch: pytest.MonkeyPatch, script: list[int]) -> list[str]:
    monkeypatch.setattr("tamis.generate.sample.generate", Scripted(script).steps)
    return list(generate_text(None, tokenizer_for("byte"), "x", 99))  # type: ignore[arg-type]


def test_a_character_of_several_bytes_is_streamed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = stream(monkeypatch, list("né €𝄞!".encode()))
    assert "".join(pieces) == "né €𝄞!"
    assert "�" not in "".join(pieces)


def test_invalid_utf8_is_replaced_and_the_text_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(stream(monkeypatch, [*b"a", 0xFF, *b"b", 0xE2, 0x82])) == "a�b�"


def test_end_of_text_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(stream(monkeypatch, [*b"end", 256])) == "end"


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 5, "no prompt"),
        ([PROMPT, []], 5, "prompt 2 is empty"),
        ([[1, 2, 257]], 5, "prompt 1 holds token 257; this model has 0 to 256"),
        ([[1, -1]], 5, "holds token -1"),
        ([PROMPT], 0, "max_new_tokens must be at least 1"),
        ([[0] * 90], 7, "90 tokens; with 7 new ones that is more than the 96"),
    ],
)
def test_a_bad_prompt_is_refused_with_what_to_change(prompts, new, message) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate(small_model(), prompts, new))


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_prompt_may_fill_the_cache_to_its_last_token() -> None:
    assert len(tokens_of(generate(small_model(), [[0] * 90], 6))[0]) == 6


def test_without_a_prompt_stdin_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Fellow citizens\nof the Senate\n"))
    assert gather_prompts([], None) == ["Fellow citizens\nof the Senate"]
    with pytest.raises(ValueError, match="there is no prompt: write it after the checkpoint"):
        gather_prompts([], None)  # nothing is left of it
