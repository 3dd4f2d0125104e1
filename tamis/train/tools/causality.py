"""`tamis causality`: no output depends on later tokens. Three tests of the whole model; `full` adds edge lengths.

The model is the configured one, freshly initialised: the tests check the code on this device, not trained weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.attention.functional import describe, why_no_kernels
from tamis.config import Config
from tamis.model import DTYPES, Decoder
from tamis.run.files.records import optional_write, write_text_atomic
from tamis.train.distributed import choose_device, device_name
from tamis.train.step import autocast
from tamis.train.tools.selfcheck import Result, selfcheck

REPORTS = Path("artifacts/test-reports")
DECODED = 16  # tokens decoded one by one through the caches
AGREEMENT = 1e-3  # of float32 logits, relative: differences in the order of summation


@dataclass(frozen=True)
class Trial:
    """A group of tests with a description to print first: on a CPU one takes up to a minute."""

    what: str
    results: Callable[[], list[Result]]


def run_causality_tests(config: Config, full: bool = False, reports: Path = REPORTS) -> int:
    """Run the tests, print and store the results; returns 0 if all passed, else 1."""
    device = choose_device(config, 0)
    lines = [f"causality of {config.model.name} ({config.model.attention}) on {device_name(device)}"]
    if device.type == "cpu":
        lines.append("no GPU: this runs on the CPU, where the plain-PyTorch reference computes attention")
    lines.append(describe(device, DTYPES[config.runtime.precision], config.model.d_k))
    print("\n".join(lines), flush=True)
    model, tokens = _fresh_model(config, device)
    passed = _run(_three_tests(model, tokens), "Causality test", lines)
    if full:
        passed &= _run(_extended_tests(model, tokens), "Extended tests", lines)
    path = reports / f"causality_{time.strftime('%Y%m%d_%H%M%S')}.log"
    with optional_write():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(lines) + "\n")
        print(f"log: {path}")
    return 0 if passed else 1


def _run(trials: Sequence[Trial], title: str, lines: list[str]) -> bool:
    """Print each trial and its results, add the results to `lines`; returns whether all passed."""
    results: list[Result] = []
    for number, trial in enumerate(trials, start=1):
        print(f"     {number}/{len(trials)} trying {trial.what} …", flush=True)
        for result in trial.results():
            results.append(result)
            _say(_line(result), lines)
    passed = sum(result.passed for result in results)
    _say(f"{title}: {passed}/{len(results)} passed" + ("" if passed == len(results) else " – do not train"), lines)
    return passed == len(results)


def _line(result: Result) -> str:
    mark = "ok  " if result.passed else "FAIL"
    return f"{mark} {result.name}: {result.measured:.3g} (limit {result.limit:.3g}) {result.detail}".rstrip()


def _say(line: str, lines: list[str]) -> None:
    lines.append(line)
    print(line, flush=True)


def _fresh_model(config: Config, device: torch.device) -> tuple[Decoder, Tensor]:
    """Return a fresh model, and random tokens for the longest test."""
    torch.manual_seed(config.train.seed)
    longest = 4 * config.nsa.w + config.nsa.l + 1
    model = Decoder(config, max_len=longest).to(device).eval()
    return model, torch.randint(config.vocab_size, (1, longest), device=device)


def _three_tests(model: Decoder, tokens_1S: Tensor) -> list[Trial]:
    tokens = tokens_1S[:, : 2 * model.config.nsa.w + 5]  # longer than the window, and not a multiple of any block size
    length = f"at {tokens.shape[1]:,} tokens"
    return [
        Trial(f"another future, {length}", partial(_autocast, future_does_not_change_past, model, tokens)),
        Trial(f"gradients, {length}", partial(_autocast, no_gradient_from_past_to_future, model, tokens)),
        Trial(f"decoding, {length}", lambda: [decode_equals_forward(model, tokens)]),
    ]


def _extended_tests(model: Decoder, tokens_1S: Tensor) -> list[Trial]:
    config, device = model.config, tokens_1S.device
    edges = (config.nsa.l, config.nsa.w, 2 * config.nsa.w, 4 * config.nsa.w)
    lengths = sorted({max(2, edge + offset) for edge in edges for offset in (-1, 0, 1)})
    if reason := why_no_kernels(device, DTYPES[config.runtime.precision], config.model.d_k):
        print(f"     kernels are not compared with the reference: {reason}")
    return [
        *(
            Trial(
                f"another future, at {length:,} tokens",
                partial(_autocast, future_does_not_change_past, model, tokens_1S[:, :length]),
            )
            for length in lengths
        ),
        Trial("kernels, causality and random tokens, as before step 1", lambda: selfcheck(config, device)),
    ]


def _autocast(test: Callable[[Decoder, Tensor], Result], model: Decoder, tokens_1S: Tensor) -> list[Result]:
    with autocast(model.config, tokens_1S.device):
        return [test(model, tokens_1S)]


@torch.no_grad()
def future_does_not_change_past(model: Decoder, tokens_1S: Tensor) -> Result:
    """Change all tokens from a position on, for several positions: no earlier output may change by a single bit."""
    length = tokens_1S.shape[1]
    before = model(tokens_1S)[0]
    past = future = 0.0
    for turn in sorted({length // 4, length // 2, length - 1} - {0}):
        changed = tokens_1S.clone()
        changed[:, turn:] = (changed[:, turn:] + 1) % model.config.vocab_size
        difference = (model(changed)[0] - before).abs().float()
        past, future = max(past, _largest(difference[:, :turn])), max(future, _largest(difference[:, turn:]))
    detail = f"at {length} tokens; what follows moves by {future:.2g}"
    return Result("changing the future leaves the past", past == 0.0 and future > 0.0, past, 0.0, detail)


def no_gradient_from_past_to_future(model: Decoder, tokens_1S: Tensor) -> Result:
    """Check that the loss of the first half has a gradient at every earlier input and exactly zero at later ones."""
    half = tokens_1S.shape[1] // 2
    kept: list[Tensor] = []
    hook = model.embedding.register_forward_hook(partial(_keep_with_gradient, kept))
    try:
        hidden = model(tokens_1S)[0]
    finally:
        hook.remove()
    loss = F.cross_entropy(model.logits(hidden[0, :half]).float(), tokens_1S[0, 1 : half + 1])
    gradient = torch.autograd.grad(loss, kept[0])[0].abs().float()
    leaked, seen = _largest(gradient[:, half:]), float(gradient[:, :half].amax(dim=(0, 2)).min())
    detail = f"loss of {half} tokens; smallest gradient of an earlier token {seen:.2g}"
    return Result(
        "losses of the past have no gradient in the future", leaked == 0.0 and seen > 0.0, leaked, 0.0, detail
    )


def _keep_with_gradient(kept: list[Tensor], module: object, inputs: object, output: Tensor) -> None:
    kept.append(output)


@torch.no_grad()
def decode_equals_forward(model: Decoder, tokens_1S: Tensor) -> Result:
    """Prefill most tokens and decode the rest one by one: the logits must equal those of one forward pass."""
    length = tokens_1S.shape[1]
    start = max(1, length - DECODED)
    expected = model.logits(model(tokens_1S)[0][:, start - 1 :])
    cache = model.new_cache(1, length)
    hidden = [model.extend(tokens_1S[:, :start], cache)[:, -1]]
    for position in range(start, length):
        cache.reserve(1)
        hidden.append(model.step(tokens_1S[:, position], cache))
    difference = (model.logits(torch.stack(hidden, dim=1)) - expected).norm() / expected.norm()
    measured = float(difference)
    detail = f"{start} tokens by one tile, {length - start} one by one"
    return Result("cached decode equals the forward pass", measured <= AGREEMENT, measured, AGREEMENT, detail)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
