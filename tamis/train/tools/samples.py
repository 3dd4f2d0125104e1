"""Samples while training: every evaluation continues the same openings of held-out text, in OUT/samples.jsonl.

It may take one percent of the run's time: a continuation is cut short there, and left out when the time is spent.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from tamis.attention.cache import Cache
from tamis.attention.layer import NSAAttention
from tamis.attention.verify import require_decode
from tamis.config import Config
from tamis.data.tokenizer import tokenizer_for
from tamis.model import Decoder
from tamis.run.files.console import say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import Sample, SampleLog

SHARE_OF_TIME = 0.01
LAST_S = 5.0  # the sample after the last step may take this long in any case
PROMPT_TOKENS, NEW_TOKENS = 32, 64
TEMPERATURE = 0.8


class SampleWriter:
    """Writes the samples of one run.

    Args:
        why_not: the reason why this rank writes none; None if it does.
    """

    def __init__(self, config: Config, run: RunDirectory, decoder: Decoder, why_not: str | None) -> None:
        self.config, self.decoder, self.log = config, decoder, SampleLog(run.samples)
        self.is_on = config.train.samples > 0 and why_not is None and config.train.seq_len > 1
        self.began, self.spent_s = time.monotonic(), 0.0
        self.is_verified = False

    def resume_at(self, step: int) -> None:
        """Drop the samples an interrupted run wrote beyond the checkpoint it resumes from."""
        if self.is_on:
            self.log.resume_at(step)

    def write(self, step: int, batches: list[np.ndarray]) -> list[Sample]:
        """Continue the openings in the validation batches, and return what was written; nothing when time is short."""
        started = time.monotonic()
        allowed_s = SHARE_OF_TIME * (started - self.began) - self.spent_s
        if step == self.config.train.steps:
            allowed_s = max(allowed_s, LAST_S)
        if not self.is_on or not batches or allowed_s <= 0:
            return []
        try:
            samples = self._samples(step, batches, deadline=started + allowed_s)
            self.log.append(samples)
        except Exception as error:  # a sample that fails, whatever the reason, must not end the training
            self.is_on, samples = False, []
            say(f"no samples from here on: {error!r}")
        self.spent_s += time.monotonic() - started
        return samples

    def _samples(self, step: int, batches: list[np.ndarray], deadline: float) -> list[Sample]:
        self._verify()
        tokenizer = tokenizer_for(self.config.data.tokenizer)
        room = self.config.train.seq_len
        openings = held_out_openings(batches, tokenizer.eot, self.config.train.samples, min(PROMPT_TOKENS, room // 2))
        count = min(NEW_TOKENS, room - openings.shape[1])
        continued = continue_openings(self.decoder, openings, count, self.config.train.seed, deadline)
        return [
            Sample(step, tokenizer.decode(opening[opening != tokenizer.eot].tolist()), tokenizer.decode(tokens))
            for opening, tokens in zip(openings, continued, strict=True)
            if tokens
        ]

    def _verify(self) -> None:
        """Compare the decode kernels with the reference before their first use on a GPU."""
        weight = self.decoder.embedding.weight
        layers = [layer for layer in self.decoder.modules() if isinstance(layer, NSAAttention)]
        if weight.is_cuda and layers and not self.is_verified:
            layer = layers[0]
            require_decode(weight.device, weight.dtype, layer.heads, layer.groups, layer.dim, layer.spec)
        self.is_verified = True


def held_out_openings(batches: list[np.ndarray], end_of_text: int, count: int, length: int) -> np.ndarray:
    """Return the first `length` tokens of up to `count` documents `[count, length]`; of rows where none begins."""
    tokens = np.concatenate([batch[:, :-1] for batch in batches]).ravel()
    starts = np.flatnonzero(tokens[: len(tokens) - length + 1] == end_of_text)[:count]
    if not len(starts):
        starts = np.arange(0, len(tokens) - length + 1, batches[0].shape[1] - 1)[:count]
    return np.stack([tokens[start : start + length] for start in starts])


@torch.no_grad()
def continue_openings(
    decoder: Decoder, openings_BP: np.ndarray, count: int, seed: int, deadline: float
) -> list[list[int]]:
    """Return up to `count` sampled tokens of each opening; fewer at the deadline, a time of time.monotonic().

    On a GPU, openings are read token by token, so that no other kernels are compiled than those of decode steps.
    """
    device = decoder.embedding.weight.device
    opening_BP = torch.from_numpy(openings_BP).to(device, torch.long)
    cache = decoder.new_cache(len(opening_BP), opening_BP.shape[1] + count)
    generator, found = torch.Generator().manual_seed(seed), list[Tensor]()
    hidden_BE = _read(decoder, opening_BP, cache)
    while len(found) < count and time.monotonic() < deadline:
        if found:
            cache.reserve(1)
            hidden_BE = decoder.step(found[-1].to(device), cache)
        p_BV = (decoder.logits(hidden_BE).float().cpu() / TEMPERATURE).softmax(dim=-1)
        found.append(torch.multinomial(p_BV, 1, generator=generator)[:, 0])
    return torch.stack(found, dim=1).tolist() if found else [[] for _ in opening_BP]


def _read(decoder: Decoder, opening_BP: Tensor, cache: Cache) -> Tensor:
    """Return the hidden states `[B,E]` of the openings' last tokens."""
    if not opening_BP.is_cuda:
        return decoder.extend(opening_BP, cache)[:, -1]
    for tokens_B in opening_BP.unbind(1):
        cache.reserve(1)
        hidden_BE = decoder.step(tokens_B, cache)
    return hidden_BE
