"""Comparison of the kernels with the reference on the present device: every branch, the whole, caches, and causality.

Each branch alone is the whole with its gate 1 and the others 0, so that the path that trains is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tamis.attention import functional as attention
from tamis.attention import reference
from tamis.attention.decode import nsa_decode, tile_attention, use_kernels
from tamis.attention.packing import documents
from tamis.attention.spec import DeviceStart, NSASpec

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
SELECTION_LIMIT = 1e-5  # share of a row's best score that its choice may lose: float32 rounding, not wrong blocks
REFERENCE_SCORES = 1 << 29  # heads × queries × keys that the reference may hold, in float32, several times over
TILE = 29  # queries of a tile over the caches
MANY = 36  # sequences: their decode kernels have tiles of their own
LONG = 5  # times n_sel blocks: here the selected branch no longer takes the form of short sequences alone
CASES = ("compressed", "selected", "window", "whole")
WHOLE = 3
INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
BRANCH_OF = {"k_cmp": 0, "v_cmp": 0, "k_sel": 1, "v_sel": 1, "k_win": 2, "v_win": 2}


@dataclass(frozen=True)
class Check:
    """One comparison: relative RMSE unless the name states another measure."""

    name: str
    measured: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.limit  # False for NaN

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name:24} {self.measured:.2e} (limit {self.limit:.0e})"


def verify(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    backend: attention.Backend = "auto",
    tokens: int | None = None,
    seed: int = 0,
) -> list[Check]:
    """Compare `backend` with the reference at this shape, by default at an odd length."""
    tokens = tokens or odd_length(spec)
    inputs = random_inputs(device, dtype, heads, groups, dim, spec, tokens, seed)
    checks = []
    for branch, case in enumerate(CASES):
        one_branch = torch.eye(4, 3, dtype=dtype, device=device)[branch].expand_as(inputs[-1])
        gates = inputs[-1] if branch == WHOLE else one_branch
        checks += _agreement(case, branch, [*inputs[:-1], gates], spec, backend)
    return [*checks, *(check(inputs, spec, backend) for check in (_selection, _repeats, _causality))]


def verify_packed(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    backend: attention.Backend = "auto",
    tokens: int | None = None,
    times: int = 1,
    max_seqlen: int | None = None,
) -> list[Check]:
    """Compare `backend` with the reference on a row of packed documents; the last one is empty.

    The row repeats the documents so many `times`, and the last repetition is compared: long rows take other kernels.
    Kernels are also chosen by `max_seqlen`, by default the tokens of one repetition; a longer document raises it.
    """
    tokens = tokens or odd_length(spec)
    inputs = random_inputs(device, dtype, heads, groups, dim, spec, tokens)
    ends = (0, 1, tokens // 8, tokens // 2, tokens, tokens)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    bound = max(max_seqlen or tokens, *(end - begin for begin, end in pairwise(ends)))
    return _agreement("packed", WHOLE, inputs, spec, backend, offsets, times, bound)


def verify_batch(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    batch: int,
    backend: attention.Backend = "auto",
    tokens: int | None = None,
) -> list[Check]:
    """Compare the last sequence of a batch with the reference: large calls have kernels and an order of their own."""
    inputs = random_inputs(device, dtype, heads, groups, dim, spec, tokens or odd_length(spec))
    return _agreement(f"batch of {batch}", WHOLE, inputs, spec, backend, times=batch)


def odd_length(spec: NSASpec) -> int:
    """A multiple of nothing, with more blocks than a query chooses."""
    return (spec.n_sel + 5) * spec.l_sel + 5


def length_like(seq_len: int, heads: int, spec: NSASpec) -> int:
    """At which to prove kernels that train on `seq_len`: there itself, or where the reference would not fit, shorter.

    Triton compiles a kernel again for lengths with another divisibility. At the length of training, nearly all that is
    compared is the machine code that trains, and the first step finds it compiled. `verify_batch` has what large calls
    take instead.
    """
    enough = 5 * spec.n_sel * spec.l_sel  # tokens from which on a long sequence's forms all take part
    most = min(enough, math.isqrt(REFERENCE_SCORES // heads))
    even = 16 * spec.l_sel
    return seq_len if seq_len <= most else max(even, most // even * even)


def random_inputs(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    tokens: int,
    seed: int = 0,
    batch: int = 1,
) -> list[Tensor]:
    """The tensor arguments of `nsa_attention`, in order; drawn on the CPU so that a seed means the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    blocks = spec.compressed_blocks(tokens)
    lengths = (blocks, blocks, tokens, tokens, tokens, tokens)
    shapes = [(batch, tokens, heads, dim), *((batch, n, groups, dim) for n in lengths), (batch, tokens, heads, 3)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(device, dtype) for x in [*tensors[:-1], torch.sigmoid(tensors[-1])]]


def relative_rmse(measured: Tensor, expected: Tensor) -> float:
    """`‖measured − expected‖ / ‖expected‖`; infinite where anything is not finite, 0 for two empty or zero tensors."""
    measured, expected = measured.double(), expected.double()
    if not (torch.isfinite(measured).all() and torch.isfinite(expected).all()):
        return float("inf")
    error, size = (measured - expected).norm().item(), expected.norm().item()
    return error / size if size else (0.0 if error == 0 else float("inf"))


def _agreement(
    case: str,
    branch: int,
    inputs: list[Tensor],
    spec: NSASpec,
    backend: attention.Backend,
    cu_seqlens: Tensor | None = None,
    times: int = 1,
    max_seqlen: int = 0,
) -> list[Check]:
    """Compare inputs, as the last of so many in a batch or a row, with the reference on these inputs alone."""
    generator = torch.Generator().manual_seed(1 + branch)
    dout = torch.randn(inputs[0].shape, generator=generator).to(inputs[0])

    # The reference takes the same rounded inputs, but in float32: its gradients are not rounded to half precision.
    expected = _out_and_gradients(_reference(spec, cu_seqlens), [x.float() for x in inputs], dout.float())
    last = _last_of_batch if cu_seqlens is None else partial(_last_of_row, cu_seqlens, max_seqlen)
    measured = last(inputs, dout, spec, backend, times)
    return [
        Check(f"{case} {name}", relative_rmse(got, want), LIMIT[inputs[0].dtype])
        for name, got, want in zip(("out", *(f"d{x}" for x in INPUTS)), measured, expected, strict=True)
        if branch == WHOLE or BRANCH_OF.get(name[1:], branch) == branch
    ]


def _last_of_batch(
    inputs: list[Tensor], dout: Tensor, spec: NSASpec, backend: attention.Backend, batch: int
) -> list[Tensor]:
    """Output and gradients of a sequence that is the last of a batch."""
    *many, many_dout = (_behind_others(x, batch, 0) for x in (*inputs, dout))
    return [x[-1:] for x in _out_and_gradients(_kernels(spec, backend), many, many_dout)]


def _last_of_row(
    cu_seqlens: Tensor,
    max_seqlen: int,
    inputs: list[Tensor],
    dout: Tensor,
    spec: NSASpec,
    backend: attention.Backend,
    times: int,
) -> list[Tensor]:
    """Output and gradients of the last repetition in a row that repeats the documents so many times."""
    tokens = dout.shape[1]
    *_, (_, last_blocks) = documents(cu_seqlens, tokens, spec)
    used = [last_blocks.stop if name in ("k_cmp", "v_cmp") else tokens for name in ("out", *INPUTS)]
    dout_row, *row = (_behind_others(x[:, :n], times, 1) for x, n in zip((dout, *inputs), used, strict=True))
    room = spec.compressed_blocks(tokens * times)
    row[1:3] = (torch.cat((x, x.new_ones(1, room - x.shape[1], *x.shape[2:])), dim=1) for x in row[1:3])
    offsets = torch.cat([cu_seqlens[:-1] + i * tokens for i in range(times)] + [cu_seqlens[-1:] * times])
    got = _out_and_gradients(_kernels(spec, backend, cu_seqlens=offsets, max_seqlen=max_seqlen), row, dout_row)
    before = [(times - 1) * n for n in used]
    return [x[:, n : n + y.shape[1]] for x, n, y in zip(got, before, (dout, *inputs), strict=True)]


def _behind_others(x: Tensor, times: int, dim: int) -> Tensor:
    """`x` as the last of so many along a dimension; the others have its tokens in reverse order."""
    return torch.cat([x.flip(1)] * (times - 1) + [x], dim) if times > 1 else x


def _kernels(spec: NSASpec, backend: attention.Backend, **row: Any) -> Callable[..., Tensor]:
    return partial(attention.nsa_attention, spec=spec, backend=backend, **row)


def _reference(spec: NSASpec, cu_seqlens: Tensor | None) -> Callable[..., Tensor]:
    return partial(reference.nsa_attention, spec=spec, cu_seqlens=cu_seqlens)


def _out_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _selection(inputs: list[Tensor], spec: NSASpec, backend: attention.Backend) -> Check:
    """What a choice loses against the best in the reference's scores; missing forced or repeated blocks: everything."""
    q, k_cmp = inputs[:2]
    ids = attention.select_blocks(q, k_cmp, spec, backend=backend)
    best = reference.select_blocks(q, k_cmp, spec)
    scores_BSGJ = reference.block_scores(q, k_cmp, spec).transpose(1, 2)
    same_count = bool(((ids >= 0).sum(-1) == (best >= 0).sum(-1)).all())
    ascending = bool(((ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] < 0)).all())
    newest = torch.arange(q.shape[1], device=q.device)[None, :, None, None] // spec.l_sel
    forced = all(bool((ids == block.clamp(min=0)).any(-1).all()) for block in (newest * 0, newest, newest - 1))
    if not (same_count and ascending and forced):
        return Check("selection loss", float("inf"), SELECTION_LIMIT)

    def total(chosen: Tensor) -> Tensor:
        return scores_BSGJ.gather(-1, chosen.clamp(min=0).long()).mul(chosen >= 0).sum(-1)

    loss = (total(best) - total(ids)) / total(best).clamp(min=1e-30)
    return Check("selection loss", loss.max().item(), SELECTION_LIMIT)


def _repeats(inputs: list[Tensor], spec: NSASpec, backend: attention.Backend) -> Check:
    """Largest difference between two runs on the same inputs, forward and backward: must be none at all."""

    runs = [_out_and_gradients(_kernels(spec, backend), inputs, inputs[0]) for _ in range(2)]
    return Check("repeat difference", _largest_difference(*runs), 0.0)


def _causality(inputs: list[Tensor], spec: NSASpec, backend: attention.Backend) -> Check:
    """Largest change of any output before a token when everything from that token on changes: must be none at all."""
    tokens = inputs[0].shape[1]
    turn = tokens // 2 + 1
    starts = [turn, *[spec.compressed_blocks(turn)] * 2, *[turn] * 5]
    changed = [torch.cat([x[:, :start], -3 * x[:, start:]], dim=1) for x, start in zip(inputs, starts, strict=True)]
    outs = [_kernels(spec, backend)(*x)[:, :turn] for x in (inputs, changed)]
    return Check("causality difference", _largest_difference([outs[0]], [outs[1]]), 0.0)


def _largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    differences = [(a.double() - b.double()).abs().max() for a, b in zip(first, second, strict=True) if a.numel()]
    return torch.stack(differences).max().item()


def verify_decode(
    device: torch.device | str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    kernels: bool | None = None,
    seed: int = 0,
) -> list[Check]:
    """Compare steps at early, middle and late positions, a short and a long tile, with the reference at this shape."""
    tokens = (spec.n_sel + 5) * spec.l_sel + 5
    positions = torch.tensor([tokens - 1, tokens // 2, spec.l - 1, 0], device=device)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    blocks = spec.compressed_blocks(tokens)
    kept = [normal(len(positions), n, 2, groups, dim) for n in (blocks + 1, tokens, spec.w)]
    q, gates = normal(len(positions), heads, dim), torch.sigmoid(normal(len(positions), heads, 3))
    step: tuple[Any, ...] = (q, *kept, gates, positions, spec)
    attend: Callable[..., Any] = nsa_decode
    got, _, reads = attend(*step, kernels=kernels)
    again = attend(*step, kernels=kernels)[0]
    want, _, expected_reads = attend(*_exact(step), kernels=False)
    many = (x.repeat(MANY // len(positions), *[1] * (x.dim() - 1)) for x in (q, *kept, gates, positions))
    of_many = attend(*many, spec, kernels=kernels)[0]
    return [
        Check("decode out", relative_rmse(got, want), LIMIT[dtype]),
        Check("decode of many out", relative_rmse(of_many, want.repeat(MANY // len(positions), 1, 1)), LIMIT[dtype]),
        Check("decode reads differ", float((reads != expected_reads).sum()), 0.0),
        Check("decode bits differ", float((got != again).sum()), 0.0),
        *(
            Check(name, _tile_error(normal, heads, groups, dim, spec, end, on_device, kernels), LIMIT[dtype])
            for name, end, on_device in (
                ("tile out", tokens, False),
                ("long tile out", LONG * spec.n_sel * spec.l_sel + 5, use_kernels(q, kernels, groups)),
            )
        ),
    ]


def _tile_error(
    normal: Callable[..., Tensor],
    heads: int,
    groups: int,
    dim: int,
    spec: NSASpec,
    end: int,
    on_device: bool,
    kernels: bool | None,
) -> float:
    """Relative RMSE of the newest TILE queries of `end` tokens; `on_device`: where kernels find their position."""
    start = max(1, end - TILE)
    first_key = max(0, start - spec.w + 1)
    caches = [normal(1, n, 2, groups, dim) for n in (spec.compressed_blocks(end), end, end - first_key)]
    q, gates = normal(1, end - start, heads, dim), torch.sigmoid(normal(1, end - start, heads, 3))
    tile: tuple[Any, ...] = (q, *caches, gates, spec)
    begin = DeviceStart(start, torch.tensor([start], device=q.device)) if on_device else start
    attend: Callable[..., Any] = tile_attention
    got = attend(*tile, begin, first_key, kernels=kernels)[0]
    return relative_rmse(got, attend(*_exact(tile), start, first_key, kernels=False)[0])


def _exact(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same rounded numbers in float32, so that the reference adds no rounding of its own."""
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


@cache
def require_decode(device: torch.device, dtype: torch.dtype, heads: int, groups: int, dim: int, spec: NSASpec) -> None:
    """Refuse a device whose kernels disagree with the specification; once for each shape."""
    failed = [check for check in verify_decode(device, dtype, heads, groups, dim, spec) if not check.passed]
    if failed:
        found = "; ".join(map(str, failed))
        raise RuntimeError(f"attention over the caches is wrong on {device}: {found}; use --device cpu and report it")
