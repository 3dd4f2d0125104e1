"""Sequences of 262,144 and 1,048,576 tokens on one GPU: `python -m tests.gpu.long [part …]`; all parts by default.

- `attention`: outputs and all gradients of M7C's attention over 1,048,576 tokens. With a loss on the last queries alone
  they are compared with the reference, with one on the first 8,192 queries with a sequence of that length.
- `far`: the same at the paper's shape, with more than 2^31 elements of queries in one sequence.
- `262144`, `1048576`: steps of M7C with activation checkpointing: loss, seconds, tokens/s, peak memory.
- `dense`: the same of the dense twin at 262,144 tokens.
- `inference`: prefill and decode at 1,048,576 tokens.

Each line is printed when it is known; the last one is JSON. Exit code 1 if anything is not finite or disagrees.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tamis.attention import NSASpec, nsa_attention, reference, select_blocks
from tamis.attention.agreement import relative_rmse
from tamis.config import Config, load_config
from tamis.generate.load import to_inference
from tamis.generate.sample import PREFILL_TILE, DecodeStep, prefill
from tamis.model import Decoder
from tamis.train.distributed import Ranks
from tamis.train.metrics import unpack_step
from tamis.train.step import TrainStep

DEVICE = torch.device("cuda", 0)
LONG, LONGEST = 262_144, 1_048_576
LAST, FIRST = 16, 8192  # queries with a loss
STEPS = {LONG: 3, LONGEST: 2}  # the first compiles
LIMIT, LIMIT_OF_CHOICES = 5e-3, 1e-3
SPEC = NSASpec()
FAR = 262_208  # tokens: with 64 heads of dim 128 the last ones lie beyond 2^31 elements
NAMES = ("dq", "dk_cmp", "dv_cmp", "dk_sel", "dv_sel", "dk_win", "dv_win", "dgates")


def main() -> int:
    chosen = sys.argv[1:] or list(PARTS)
    found, ok = {}, True
    for name in chosen:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        row, passed = PARTS[name]()
        row |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}
        row |= {"part_s": round(time.perf_counter() - began, 1)}
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {row}", flush=True)
        found[name], ok = row, ok and passed
    print(json.dumps({"device": torch.cuda.get_device_name(DEVICE), "rows": found}))
    return 0 if ok else 1


def random_attention(tokens: int, heads: int, groups: int, dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = SPEC.compressed_blocks(tokens)
    sizes = [(tokens, heads), *((n, groups) for n in (blocks, blocks, tokens, tokens, tokens, tokens))]
    tensors = [torch.randn(1, *size, dim, dtype=torch.bfloat16, device=DEVICE) for size in sizes]
    gates = torch.rand(1, tokens, heads, 3, dtype=torch.bfloat16, device=DEVICE)
    return [x.requires_grad_() for x in (*tensors, gates)]


def attention_part(tokens: int, heads: int, groups: int, dim: int) -> tuple[dict[str, Any], bool]:
    """The gradients of a loss on few queries: everything they do not see gets none."""
    inputs = random_attention(tokens, heads, groups, dim)
    out = nsa_attention(*inputs, SPEC)
    row: dict[str, Any] = {}
    for name, rows, expected in (
        ("last", slice(tokens - LAST, tokens), expected_of_last),
        ("first", slice(0, FIRST), expected_of_first),
    ):
        dout = torch.zeros_like(out)
        dout[:, rows] = torch.randn_like(dout[:, rows])
        got = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        errors = compare(out[:, rows], got, *expected(inputs, dout[:, rows]))
        row |= {f"{name} {key}": value for key, value in errors.items()}
    chosen, places = select_blocks(*inputs[:2], SPEC), (tokens // 4, tokens // 2, tokens - LAST)
    expected = [reference.select_blocks(inputs[0][:, at : at + LAST], inputs[1], SPEC, at) for at in places]
    found = [chosen[:, at : at + LAST] for at in places]
    row["choices that differ"] = float((torch.cat(found) != torch.cat(expected)).float().mean())
    passed = all(x <= LIMIT for key, x in row.items() if key != "choices that differ")
    return row, passed and row["choices that differ"] <= LIMIT_OF_CHOICES


def expected_of_last(inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, list[Tensor]]:
    """By the reference in float32: full gradients of keys and values, and of the last queries and gates."""
    start = inputs[0].shape[1] - LAST
    ids = select_blocks(*inputs[:2], SPEC)[:, start:]
    leaves = [x.detach().float().requires_grad_() for x in (inputs[0][:, start:], *inputs[1:7], inputs[7][:, start:])]
    out = reference.nsa_attention(*leaves, SPEC, block_ids=ids, start=start)
    return out, list(torch.autograd.grad(out, leaves, dout.float()))


def expected_of_first(inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, list[Tensor]]:
    """By the same kernels on the first tokens alone."""
    lengths = [FIRST, *[SPEC.compressed_blocks(FIRST)] * 2, *[FIRST] * 5]
    leaves = [x.detach()[:, :n].clone().requires_grad_() for x, n in zip(inputs, lengths, strict=True)]
    out = nsa_attention(*leaves, SPEC)
    return out, list(torch.autograd.grad(out, leaves, dout))


def compare(out: Tensor, got: tuple[Tensor, ...], want_out: Tensor, want: list[Tensor]) -> dict[str, float]:
    """Relative RMSE of each; where nothing is expected, the largest gradient found there counts as an error."""
    errors = {"out": relative_rmse(out, want_out)}
    for name, found, expected in zip(NAMES, got, want, strict=True):
        at_end = name in ("dq", "dgates") and expected.shape[1] == LAST
        inside = slice(found.shape[1] - LAST, None) if at_end else slice(0, expected.shape[1])
        outside = found[:, : found.shape[1] - LAST] if at_end else found[:, expected.shape[1] :]
        stray = float(outside.abs().max()) if outside.numel() else 0.0
        errors[name] = max(relative_rmse(found[:, inside], expected), stray)
    return {name: round(error, 6) for name, error in errors.items()}


def m7c(tokens: int, attention: str) -> Config:
    keys = {"model.attention": attention, "train.seq_len": tokens, "train.batch_size": 1}
    keys |= {"runtime.gradient_checkpointing": "true", "data.dataset": "synthetic", "data.packing": "stream"}
    return load_config("configs/m7c_125m_80g.yaml", [f"{key}={value}" for key, value in keys.items()])


def training_part(tokens: int, attention: str = "nsa") -> tuple[dict[str, Any], bool]:
    config = m7c(tokens, attention)
    began = time.perf_counter()
    torch.manual_seed(0)
    with DEVICE:
        decoder = Decoder(config)
    step = TrainStep(decoder, config, Ranks(0, 1, DEVICE))
    draw, losses, norms, seconds = np.random.default_rng(0), [], [], []
    for number in range(1, STEPS[tokens] + 1):
        batch = draw.integers(config.vocab_size, size=(1, 1, tokens + 1), dtype=np.int32)
        metrics = unpack_step(step(batch, number).tolist(), 0)  # waits for the step
        seconds.append(time.perf_counter() - began)
        losses.append(round(metrics.loss, 4))
        norms.append(round(metrics.grad_norm, 4))
        print(f"     {tokens:,} {attention}: step {number} ends at {seconds[-1]:.1f} s, loss {losses[-1]}", flush=True)
    rest = float(np.median(np.diff(seconds)))
    row = {"losses": losses, "grad_norms": norms, "first_step_s": round(seconds[0], 1), "step_s": round(rest, 2)}
    return row | {"toks_per_s": round(tokens / rest)}, all(map(math.isfinite, losses + norms))


def inference_part() -> tuple[dict[str, Any], bool]:
    model = Decoder(m7c(LONGEST, "nsa"), max_len=LONGEST)
    to_inference(model, DEVICE, torch.bfloat16)
    cache = model.new_cache(1)
    prompt = np.random.default_rng(0).integers(50257, size=LONGEST - 64).tolist()
    began = time.perf_counter()
    prefill(model, prompt[: 4 * PREFILL_TILE], model.new_cache(1), PREFILL_TILE)  # compiles
    torch.cuda.synchronize()
    compiled = time.perf_counter()
    hidden = prefill(model, prompt, cache, PREFILL_TILE)
    torch.cuda.synchronize()
    row: dict[str, Any] = {
        "compile_s": round(compiled - began, 1),
        "prefill_s": round(time.perf_counter() - compiled, 2),
    }
    step, token, times = DecodeStep(model, cache), torch.zeros(1, dtype=torch.int64, device=DEVICE), []
    for _ in range(20):
        started = time.perf_counter()
        hidden = step(token)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    row |= {"decode_ms": round(statistics.median(times[1:]) * 1e3, 3), "cache_gib": round(cache.bytes / 2**30, 2)}
    return row, bool(hidden.isfinite().all())


PARTS: dict[str, Callable[[], tuple[dict[str, Any], bool]]] = {
    "attention": lambda: attention_part(LONGEST, 12, 2, 64),
    "far": lambda: attention_part(FAR, 64, 4, 128),
    "262144": lambda: training_part(LONG),
    "1048576": lambda: training_part(LONGEST),
    "inference": inference_part,
    "dense": lambda: training_part(LONG, "dense"),
}

if __name__ == "__main__":
    sys.exit(main())
