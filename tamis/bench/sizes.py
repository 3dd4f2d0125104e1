"""Sizes of a bench where the user names none: those of the published tables on a GPU, small ones on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tamis.run.files.console import say


@dataclass(frozen=True)
class BenchSizes:
    shapes: tuple[str, ...] = ("m7c", "paper")
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    cached: tuple[int, ...] = (8192, 16384, 32768, 65536)  # tokens in the cache when decoding
    batches: tuple[int, ...] = (1, 8, 64)  # sequences that decode together
    tokens: int = 65536  # per call or step
    repeats: int = 7
    steps: int = 20
    warmup: int = 5


ON_CPU = BenchSizes(("m7c",), (256, 512), (2048, 8192), (1, 8), tokens=512, repeats=1, steps=4, warmup=1)


def sequences_in(tokens: int, length: int) -> int:
    """Return how many whole sequences a call or step of so many tokens has; at least one."""
    return max(1, tokens // length)


def print_other_tokens(tokens: int, lengths: Iterable[int]) -> None:
    """Print the lengths whose whole sequences do not come to the tokens that were asked for."""
    for length in lengths:
        if (whole := sequences_in(tokens, length) * length) != tokens:
            print(f"{whole:,} tokens at length {length:,}, in place of {tokens:,}: whole sequences alone", flush=True)


def default_sizes(device: str | None = None, *chosen: object) -> BenchSizes:
    """The sizes for a device, by default the one present; small ones are announced, unless all are chosen."""
    is_cpu = device == "cpu" or not torch.cuda.is_available()
    if is_cpu and device != "cuda" and (None in chosen or not chosen):
        say("no GPU: small sizes, so that the first row comes within 30 s; options choose others", sys.stderr)
    return ON_CPU if is_cpu else BenchSizes()
