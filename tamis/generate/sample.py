"""Continues prompts token by token and streams the text: `tamis generate`.

Each sequence has its own random generator with the same seed, so a prompt gives the same text alone and in a batch.
On a GPU, decode steps and later tiles of a prompt are captured once as CUDA graphs and replayed.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from tamis.attention.cache import Cache
from tamis.config import Config
from tamis.data.tokenizer import Tokenizer
from tamis.generate.load import LanguageModel, LoadedModel, load_model
from tamis.model import Decoder
from tamis.run.files.console import announced, counted, print_line, printable
from tamis.run.files.records import read_problem

PREFILL_TILE = 4096  # prompt tokens read at a time: bounds the memory of a long prompt's activations
WARM_UP_STEPS = 3  # compile kernels and set up libraries before the capture


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Temperature 0 takes the likeliest token; top_k 0 and top_p 1 exclude none."""

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
    model: Decoder | LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 1337,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Iterator[str]:
    """Yield the continuation of `prompt` piece by piece as it is sampled; stop at end-of-text.

    `model` is what `tamis.load` returns, or its decoder.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    decoder = model.decoder if isinstance(model, LanguageModel) else model
    for pieces in generate_texts(decoder, tokenizer, [prompt], max_new_tokens, sampling):
        yield pieces[0]


def generate_texts(
    model: Decoder, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int, sampling: Sampling
) -> Iterator[list[str]]:
    """Yield one piece of text per prompt and step; empty after the end, or while a character is incomplete."""
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
    """Yield the new token of every prompt, step by step; None after its stop token, which is still yielded."""
    check_prompts(model, prompts, max_new_tokens)
    sampling = sampling or Sampling()
    device = model.embedding.weight.device
    cache = model.new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens)
    hidden_BE = torch.cat([prefill(model, prompt, cache.row(i), prefill_tile) for i, prompt in enumerate(prompts)])
    step = DecodeStep(model, cache)
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
        hidden_BE = step(tokens_B)


def prefill(model: Decoder, prompt: list[int], cache: Cache, tile: int) -> Tensor:
    """Read a prompt into the cache of one sequence; return the hidden state `[1,E]` that predicts the next token."""
    tokens = torch.tensor([prompt], device=model.embedding.weight.device)
    read = TileReader(model, cache)
    hidden = [read(part) for part in tokens.split(tile, dim=1)]
    return hidden[-1]


def choose(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each sequence by inverting its distribution at a uniform number."""
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    ordered, tokens = (logits_BV.float() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    p = ordered.softmax(dim=-1)
    # A token stays while the likelier ones sum to less than top_p; the first always stays.
    p = p.where(p.cumsum(dim=-1) - p < sampling.top_p, 0)
    if sampling.top_k:
        p[:, sampling.top_k :] = 0
    total = p.cumsum(dim=-1)
    index = torch.searchsorted(total, uniform_B[:, None] * total[:, -1:], right=True)
    last = (p > 0).sum(dim=-1, keepdim=True) - 1  # rounding may point past the last token kept
    return tokens.gather(1, torch.minimum(index, last))[:, 0]


def check_prompts(model: Decoder, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Raise a ValueError that names what to change, before anything is computed."""
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
                f"prompt {number} holds token {unknown[0]}; this model has 0 to {model.config.vocab_size - 1}"
            )
        if len(prompt) + max_new_tokens > model.max_len:
            raise ValueError(
                f"prompt {number} has {counted(len(prompt), 'token')}; with {max_new_tokens} new ones that is more "
                f"than the {model.max_len} this model was built for: shorten it, ask for fewer, or raise --max-len"
            )


class TileReader:
    """Reads a prompt's tiles in turn; each call returns the hidden state `[B,E]` of the tile's last token.

    The kernels of later tiles read their position on the device, so one graph serves all tiles of a size: the first
    such tile runs without a graph, the second is captured. A capture takes as long as many tiles: with `capture` false
    none is made, for readers of one prompt.
    """

    def __init__(self, model: Decoder, cache: Cache, capture: bool = True) -> None:
        self.model, self.cache, self.capture = model, cache, capture
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens_BS = torch.empty(0)

    @torch.no_grad()
    def __call__(self, tokens_BS: Tensor) -> Tensor:
        if not tokens_BS.is_cuda:
            return self.model.extend(tokens_BS, self.cache)[:, -1]
        start = self.cache.tile_start(tokens_BS.shape[1])
        self.cache.reserve(tokens_BS.shape[1])
        known = self.tokens_BS.shape == tokens_BS.shape
        if isinstance(start, int) or not known or not self.capture:
            if not isinstance(start, int):
                self.tokens_BS, self.graph = tokens_BS.clone(), None
            return self.model.read_tile(tokens_BS, self.cache, start)[:, -1]
        self.tokens_BS.copy_(tokens_BS)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.hidden_BE = self.model.read_tile(self.tokens_BS, self.cache, start)[:, -1]
        self.graph.replay()
        return self.hidden_BE.clone()


class DecodeStep:
    """Appends one token per sequence; each call returns the hidden states `[B,E]` that predict the next."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, tokens_B: Tensor) -> Tensor:
        self.cache.reserve(1)
        if not self.cache.steps_on_device:
            return self.model.step(tokens_B, self.cache)
        if self.graph is None:
            self._capture(tokens_B)
        assert self.graph is not None
        self.tokens_B.copy_(tokens_B)
        self.graph.replay()
        return self.hidden_BE

    def _capture(self, tokens_B: Tensor) -> None:
        """Warm up and capture at the current positions; the replay that follows overwrites the same slots."""
        self.tokens_B, positions = tokens_B.clone(), self.cache.positions_B.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.model.step(self.tokens_B, self.cache)
                self.cache.positions_B.copy_(positions)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.hidden_BE = self.model.step(self.tokens_B, self.cache)


def generate_command(
    checkpoint: str | Path,
    prompts: list[str] | None = None,
    prompt_file: str | Path | None = None,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1337,
    max_len: int | None = None,
    rope_scale: float | None = None,
    config: Config | None = None,
    device: str = "auto",
    precision: str | None = None,
    out: TextIO | None = None,
    notes: TextIO | None = None,
) -> None:
    """Continue every prompt from a checkpoint; print text to `out` (stdout), facts and speed to `notes` (stderr)."""
    out, notes = out or sys.stdout, notes or sys.stderr
    sampling = Sampling(temperature, top_k, top_p, seed)
    texts = gather_prompts(prompts, prompt_file)
    with announced(f"loading {checkpoint}"):
        loaded = load_model(
            checkpoint, expected=config, max_len=max_len, rope_scale=rope_scale, device=device, precision=precision
        )
    weight = loaded.model.embedding.weight
    print_line(f"{loaded.source}: step {loaded.step}, {weight.dtype} on {weight.device}", notes)
    run = _stream if len(texts) == 1 else _collect
    started = time.perf_counter()
    _print_speed(len(texts), started, run(loaded, texts, max_new_tokens, sampling, out), notes)


def gather_prompts(prompts: list[str] | None, prompt_file: str | Path | None) -> list[str]:
    """Return the prompts given, then those of the file, one per line without blank ones; else all of stdin."""
    texts = list(prompts or [])
    if prompt_file is not None:
        try:
            lines = Path(prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompt file {prompt_file} cannot be read: {read_problem(error)}") from None
        texts += [line for line in lines if line.strip()]
    elif not texts and not sys.stdin.isatty():
        texts = [text] if (text := sys.stdin.read().strip("\n")) else []
    if not texts:
        raise ValueError("there is no prompt: write it after the checkpoint, or give a file of them by --prompt-file")
    if not all(texts):
        raise ValueError("a prompt is empty: give at least one character to continue from")
    return texts


def _stream(loaded: LoadedModel, texts: list[str], max_new_tokens: int, sampling: Sampling, out: TextIO) -> list[float]:
    """Print one prompt and its continuation as it is sampled; return the time of each token."""
    times: list[float] = []
    for (piece,) in generate_texts(loaded.model, loaded.tokenizer, texts, max_new_tokens, sampling):
        out.write(_shown(piece if times else texts[0] + piece, out))  # a prompt that is refused is not printed
        times.append(time.perf_counter())
        out.flush()
    out.write("\n")
    return times[:-1]  # the last piece only ends an incomplete character


def _shown(text: str, out: TextIO) -> str:
    """Escape control characters for a terminal; a file or a pipe gets the text as it is."""
    return printable(text) if out.isatty() else text


def _collect(
    loaded: LoadedModel, texts: list[str], max_new_tokens: int, sampling: Sampling, out: TextIO
) -> list[float]:
    """Continue all prompts together and print them in order at the end; return the time of each step."""
    times, whole = [], list(texts)
    for pieces in generate_texts(loaded.model, loaded.tokenizer, texts, max_new_tokens, sampling):
        times.append(time.perf_counter())
        whole = [text + piece for text, piece in zip(whole, pieces, strict=True)]
    for number, text in enumerate(whole, 1):
        print(f"--- prompt {number} of {len(whole)}\n{_shown(text, out)}", file=out)
    return times[:-1]


def _print_speed(prompts: int, started: float, times: list[float], notes: TextIO) -> None:
    """Print the speed; the first step, which also compiles and captures on a GPU, is printed apart from the rest."""
    line = f"first token after {times[0] - started:.2f} s"
    if len(times) > 2:
        step_s = (times[-1] - times[1]) / (len(times) - 2)
        line += f", second after {times[1] - started:.2f} s, then {prompts / step_s:.1f} tokens/s"
        line += f" ({step_s * 1e3:.2f} ms a step, {counted(prompts, 'prompt')})"
    print(line, file=notes, flush=True)
