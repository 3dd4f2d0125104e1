"""The whole model's decode step, for `tamis bench decode`: caches full of random numbers stand for a long prompt."""

from __future__ import annotations

import statistics
import time

import torch

from tamis.attention import NSASpec
from tamis.config import build_config
from tamis.generate.graph import Stepper
from tamis.generate.load import to_inference
from tamis.model import Decoder


def time_step(
    attention: str, dtype: torch.dtype, device: torch.device, spec: NSASpec, batch: int, length: int, repeats: int
) -> float:
    """Median milliseconds of one token for every sequence, ending at `length` tokens."""
    model = Decoder(build_config({"model": {"attention": attention}, "nsa": vars(spec)}), max_len=length)
    to_inference(model, device, dtype)
    cache = model.new_cache(batch)
    for layer in cache.layers:
        for tensor in layer.tensors():
            tensor.normal_()
    repeats = min(repeats, length - 1)
    cache.reserve(length - repeats - 1)
    cache.positions_B += length - repeats - 1
    stepper, tokens = Stepper(model, cache), torch.zeros(batch, dtype=torch.int64, device=device)
    times = []
    for _ in range(repeats + 1):
        started = _now(device)
        stepper(tokens)
        times.append(_now(device) - started)
    return statistics.median(times[1:]) * 1e3  # the first step captures the graph


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
