"""`tamis verify`: kernels agree with the reference and the model is causal, on this device.

Also part of `tamis check`; the kernels are checked before step 1 of every run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from tamis.attention import NSASpec
from tamis.attention.agreement import Check
from tamis.attention.functional import describe, why_no_kernels
from tamis.attention.verify import least_length, length_like, odd_length, verify, verify_batch, verify_packed
from tamis.config import Config
from tamis.config.size import random_token_floor
from tamis.model import DTYPES, Decoder
from tamis.train.distributed import choose_device
from tamis.train.guards import Anomaly
from tamis.train.step import autocast

RANDOM_TOKENS = 4096  # enough for a mean loss within a hundredth of a nat
FLOOR_MARGIN = 0.02  # nats below ln V that so many random tokens may reach by chance
LONGEST = 1024  # tokens of the causality check; far beyond every block boundary that matters


@dataclass(frozen=True)
class Result:
    """One check: `measured` against `limit`."""

    name: str
    passed: bool
    measured: float
    limit: float
    detail: str = ""


def selfcheck(config: Config, device: torch.device) -> list[Result]:
    return [
        *attention_agrees(config, device),
        *attention_agrees(config, device, odd_length(NSASpec.of(config.nsa))),
        *model_is_causal(config, device),
    ]


def attention_agrees(config: Config, device: torch.device, tokens: int | None = None) -> list[Result]:
    """Compare kernels with the reference at the trained length, or at another; empty where the reference computes.

    First every branch of one sequence is compared, as long as the reference can hold; then a micro-batch, of each
    length of `train.length_schedule`, or as many tokens in sequences of another length. Where training packs documents,
    those are short documents of a row, and for long sequences also documents that are as long.
    """
    dtype = DTYPES[config.runtime.precision]
    model, train, spec = config.model, config.train, NSASpec.of(config.nsa)
    if "nsa" not in config.layer_kinds or device.type != "cuda":
        return []
    if why_no_kernels(device, dtype, model.d_k, model.n_heads // model.n_kv_groups):
        return []
    shape = (device, dtype, model.n_heads, model.n_kv_groups, model.d_k, spec)
    one = tokens or length_like(train.seq_len, model.n_heads, spec)
    many = sequences_of(config, one)
    results = _results(verify(*shape, tokens=one), one)
    trained = max(train.seq_len, least_length(spec))
    batch, length = (many, tokens) if tokens else (train.batch_size, trained)
    packs = config.data.packing == "documents"
    if packs:
        results += _results(verify_packed(*shape, tokens=one, times=many, max_seqlen=train.seq_len), one * many)
    if length != one or (batch > 1 and not packs):
        results += _results(verify_batch(*shape, batch, tokens=length, packed=packs), length)
    for shorter in () if tokens else shorter_lengths(config, least_length(spec)):
        rows = sequences_of(config, shorter)
        checks = verify_batch(*shape, rows, tokens=shorter, packed=packs, max_seqlen=train.seq_len)
        results += _results(checks, shorter)
    return results


def _results(checks: list[Check], tokens: int) -> list[Result]:
    return [Result(f"attention {c.name}", c.passed, c.measured, c.limit, f"{tokens} tokens") for c in checks]


def shorter_lengths(config: Config, least: int = 1) -> list[int]:
    """The lengths of `train.length_schedule` before the last: kernels differ between lengths."""
    return sorted({length for length in config.train.length_schedule if least <= length < config.train.seq_len})


def sequences_of(config: Config, tokens: int) -> int:
    """How many sequences of so many tokens have as many as a micro-batch."""
    return -(-config.train.batch_size * config.train.seq_len // tokens)


def require_right_attention(config: Config, device: torch.device) -> None:
    """Raise an Anomaly if the kernels disagree with the reference on this device."""
    wrong = [result for result in attention_agrees(config, device) if not result.passed]
    torch.cuda.empty_cache()  # of the reference's scores: CUDA graphs take their memory from pools of their own
    if wrong:
        named = ", ".join(f"{r.name} {r.measured:.2e} (limit {r.limit:.0e})" for r in wrong)
        raise Anomaly("attention_mismatch", f"attention kernels disagree with the reference on this device: {named}")


@torch.no_grad()
def model_is_causal(config: Config, device: torch.device) -> list[Result]:
    """Check a freshly initialised model: the future does not reach the past, and the target does not leak."""
    torch.manual_seed(config.train.seed)
    decoder = Decoder(config).to(device).eval()
    tokens = torch.randint(config.vocab_size, (1, min(config.train.seq_len, LONGEST)), device=device)
    with autocast(config, device):
        return [_causality(decoder, tokens), _random_token_floor(decoder, config, device)]


def _causality(decoder: Decoder, tokens: torch.Tensor) -> Result:
    """Change every token from the middle on: no output before it may change by a single bit."""
    middle = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[:, middle:] = (changed[:, middle:] + 1) % decoder.config.vocab_size
    difference = (decoder(tokens)[0] - decoder(changed)[0]).abs().float()
    past, future = float(difference[:, :middle].max()) if middle else 0.0, float(difference[:, middle:].max())
    return Result(
        "causality", past == 0.0 and future > 0.0, past, 0.0, f"{tokens.shape[1]} tokens, second half changed"
    )


def _random_token_floor(decoder: Decoder, config: Config, device: torch.device) -> Result:
    """Uniform random tokens cannot be predicted: a loss below ln V means that the target leaks."""
    length = min(config.train.seq_len, LONGEST)
    rows = max(1, RANDOM_TOKENS // length)
    loss = float(decoder.loss(torch.randint(config.vocab_size, (rows, length + 1), device=device))[0])
    floor = random_token_floor(config, FLOOR_MARGIN)
    return Result("loss on random tokens is not below ln V", loss >= floor, loss, floor, f"{rows * length} tokens")


def run_selfcheck(config: Config, as_json: bool = False) -> int:
    """Run the checks on this device and print each; returns 0 if all passed, else 1."""
    device = choose_device(config, 0)
    results = selfcheck(config, device)
    if as_json:
        print(json.dumps({"checks": [asdict(result) for result in results]}))
    else:
        model = config.model
        heads_per_group = model.n_heads // model.n_kv_groups
        print(describe(device, DTYPES[config.runtime.precision], model.d_k, heads_per_group))
        for r in results:
            print(f"{'ok  ' if r.passed else 'FAIL'} {r.name}: {r.measured:.3g} (limit {r.limit:.3g}) {r.detail}")
    return 0 if all(result.passed for result in results) else 1
