"""Continues prompts token by token and streams the text.

Every sequence draws from the same seed by itself, so a prompt gives the same text alone and among others.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.data.tokenizer import Tokenizer
from tamis.generate.graph import Stepper, TileReader
from tamis.model import Decoder
from tamis.model.cache import Cache

PREFILL_TILE = 4096  # prompt tokens read at a time: bounds the memory of a long prompt's activations


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the likeliest; top_k 0 and top_p 1 leave every token in."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1337

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 1337,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece as it is drawn; ends early at end-of-text."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    for pieces in generate_texts(model, tokenizer, [prompt], max_new_tokens, sampling):
        yield pieces[0]


def generate_texts(
    model: Decoder, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int, sampling: Sampling
) -> Iterator[list[str]]:
    """One piece of text per prompt and step; empty where a prompt has ended or a character is not yet whole."""
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
    ids = [[int(i) for i in tokenizer.encode(prompt)] for prompt in prompts]
    for tokens in generate(model, ids, max_new_tokens, sampling, stop_token=tokenizer.eot):
        yield [
            decoder.decode(b"" if token in (None, tokenizer.eot) else tokenizer.to_bytes([token]))
            for decoder, token in zip(decoders, tokens, strict=True)
        ]
    yield [decoder.decode(b"", final=True) for decoder in decoders]


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    prefill_tile: int = PREFILL_TILE,
) -> Iterator[list[int | None]]:
    """The new token of every prompt, step by step; None after its stop token, which is itself still given."""
    check_prompts(model, prompts, max_new_tokens)
    sampling = sampling or Sampling()
    device = model.embedding.weight.device
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens)
    hidden_BE = torch.cat([prefill(model, prompt, cache.row(i), prefill_tile) for i, prompt in enumerate(prompts)])
    stepper = Stepper(model, cache)
    draws = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    running = [True] * len(prompts)
    for count in range(1, max_new_tokens + 1):
        uniform_B = torch.stack([torch.rand((), generator=draw) for draw in draws]).to(device)
        tokens_B = choose(model.logits(hidden_BE), uniform_B, sampling)
        tokens = tokens_B.tolist()
        yield [token if alive else None for token, alive in zip(tokens, running, strict=True)]
        running = [alive and token != stop_token for token, alive in zip(tokens, running, strict=True)]
        if count == max_new_tokens or not any(running):
            return
        hidden_BE = stepper(tokens_B)


def prefill(model: Decoder, prompt: list[int], cache: Cache, tile: int) -> Tensor:
    """Read a prompt into the cache of one sequence; the hidden state `[1,E]` that predicts the next token."""
    tokens = torch.tensor([prompt], device=model.embedding.weight.device)
    read = TileReader(model, cache)
    hidden = [read(part) for part in tokens.split(tile, dim=1)]
    return hidden[-1]


def choose(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each sequence, by inverting the distribution at its own uniform number."""
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    ordered, tokens = (logits_BV.float() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    p = ordered.softmax(dim=-1)
    # A token stays while the likelier ones together have not reached top_p: the first always does.
    p = p.where(p.cumsum(dim=-1) - p < sampling.top_p, 0)
    if sampling.top_k:
        p[:, sampling.top_k :] = 0
    total = p.cumsum(dim=-1)
    place = torch.searchsorted(total, uniform_B[:, None] * total[:, -1:], right=True)
    last = (p > 0).sum(dim=-1, keepdim=True) - 1  # rounding may point past the last token that is left
    return tokens.gather(1, torch.minimum(place, last))[:, 0]


def check_prompts(model: Decoder, prompts: list[list[int]], max_new_tokens: int) -> None:
    """A ValueError that says what to change, before anything is computed."""
    if not prompts:
        raise ValueError("there is no prompt to continue")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: give at least one token to continue from")
        unknown = [token for token in prompt if not 0 <= token < model.config.vocab_size]
        if unknown:
            raise ValueError(
                f"prompt {number} holds token {unknown[0]}; this model knows 0 to {model.config.vocab_size - 1}"
            )
        if len(prompt) + max_new_tokens > model.max_len:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with {max_new_tokens} new ones that is more than the "
                f"{model.max_len} this model was built for: shorten it, ask for fewer, or raise --max-len"
            )
