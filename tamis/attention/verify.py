"""Comparison of the kernels with the reference on the present device: every branch, the whole, caches, and causality.

Each branch alone is the whole with its gate 1 and the others 0, so that the path that trains is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tamis.attention import functional as attention
from tamis.attention import reference
from tamis.attention.agreement import (
    CASES,
    LIMIT,
    WHOLE,
    Call,
    Check,
    by_kernels,
    compare_with_reference,
    out_and_gradients,
    random_inputs,
    relative_rmse,
)
from tamis.attention.decode import nsa_decode, tile_attention, use_kernels
from tamis.attention.packing import documents
from tamis.attention.spec import DeviceStart, NSASpec

SELECTION_LIMIT = 1e-5  # share of a row's best score that its choice may lose: float32 rounding, not wrong blocks
REFERENCE_SCORES = 1 << 29  # heads × queries × keys that the reference may hold, in float32, several times over
TILE = 29  # queries of a tile over the caches
MANY = 36  # sequences: their decode kernels have tiles of their own
LONG = 5  # times n_sel blocks: here the selected branch no longer takes the form of short sequences alone


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
    inputs, call = random_inputs(device, dtype, heads, groups, dim, spec, tokens, seed), Call(spec, backend)
    ids = call.chosen_blocks(inputs)
    checks = []
    for branch, case in enumerate(CASES):
        one_branch = torch.eye(4, 3, dtype=dtype, device=device)[branch].expand_as(inputs[-1])
        gates = inputs[-1] if branch == WHOLE else one_branch
        checks += compare_with_reference(case, branch, [*inputs[:-1], gates], call, ids)
    checks.append(_selection("selection loss", inputs, ids, [slice(0, tokens)], spec))
    return [*checks, _repeats(inputs, spec, backend), _causality(inputs, spec, backend)]


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
    ends = packed_ends(tokens)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    bound = max(max_seqlen or tokens, *(end - begin for begin, end in pairwise(ends)))
    call = Call(spec, backend, times, offsets, bound)
    ids = call.chosen_blocks(inputs)
    losses = [
        _selection_loss(inputs[0][:, at], inputs[1][:, blocks], ids[:, at], spec, 0)
        for at, blocks in documents(offsets, tokens, spec)
    ]
    return [
        *compare_with_reference("packed", WHOLE, inputs, call, ids),
        Check("packed selection loss", _largest(losses), SELECTION_LIMIT),
    ]


def packed_ends(tokens: int) -> tuple[int, ...]:
    """Where the documents of one repetition end: most tokens are in one, long enough to choose among its blocks."""
    return 0, 1, 1 + tokens // 32, 1 + tokens // 8, tokens, tokens


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
    most_scores: int = REFERENCE_SCORES,
    packed: bool = False,
    max_seqlen: int | None = None,
) -> list[Check]:
    """Compare the last sequence of a batch with the reference: large calls have kernels and an order of their own.

    Of a long sequence `compared_rows` are compared; the gradient of the output is 0 elsewhere. With `packed` the
    sequences are documents of one row, of at most `max_seqlen` tokens, by default as many as they have.
    """
    tokens = tokens or odd_length(spec)
    inputs = random_inputs(device, dtype, heads, groups, dim, spec, tokens)
    rows, case = compared_rows(tokens, heads, spec, most_scores), f"{'row' if packed else 'batch'} of {batch}"
    offsets = torch.tensor((0, tokens), dtype=torch.int32, device=device) if packed else None
    call = Call(spec, backend, batch, offsets, max_seqlen or tokens)
    ids = call.chosen_blocks(inputs)
    return [
        *compare_with_reference(case, WHOLE, inputs, call, ids, rows),
        _selection(f"{case} selection loss", inputs, ids, rows + rows_between(rows), spec),
    ]


def compared_rows(tokens: int, heads: int, spec: NSASpec, most_scores: int = REFERENCE_SCORES) -> list[slice]:
    """All tokens of a sequence, or if the reference would hold more than `most_scores`, its first and last ones.

    The first are those that choose every block, and at most as many that follow.
    """
    if heads * tokens**2 <= most_scores:
        return [slice(0, tokens)]
    first = min(2 * spec.n_sel * spec.l_sel, math.isqrt(most_scores // (4 * heads)))
    last = max(1, most_scores // (2 * heads * tokens))
    return [slice(0, first), slice(tokens - last, tokens)]


def rows_between(rows: Sequence[slice]) -> list[slice]:
    """As many tokens as the last rows have at a half, a quarter, … of a long sequence, up to the first rows."""
    first, last = rows[0], rows[-1]
    begins = (last.stop >> halvings for halvings in range(1, last.stop.bit_length()))
    return [slice(begin, begin + last.stop - last.start) for begin in begins if begin >= first.stop]


def odd_length(spec: NSASpec) -> int:
    """A multiple of nothing, with more blocks than a query chooses."""
    return (spec.n_sel + 5) * spec.l_sel + 5


def length_like(seq_len: int, heads: int, spec: NSASpec) -> int:
    """At which to prove kernels that train on `seq_len`: there itself, or where the reference would not fit, shorter.

    Triton compiles a kernel again for lengths with another divisibility. At the length of training, nearly all that is
    compared is the machine code that trains, and the first step finds it compiled. `verify_batch` compares the first
    and last tokens of longer sequences. Very short ones are proved at `least_length`.
    """
    enough = 5 * spec.n_sel * spec.l_sel  # tokens from which on a long sequence's forms all take part
    most = min(enough, math.isqrt(REFERENCE_SCORES // heads))
    even = 16 * spec.l_sel
    return max(seq_len, least_length(spec)) if seq_len <= most else max(even, most // even * even)


def least_length(spec: NSASpec) -> int:
    """Of shorter sequences, or documents of the proof, the reference may have a gradient of exactly 0.

    That is the gradient of a single compressed key, which is rounding alone in a kernel: no error can be told.
    """
    return 2 * (spec.l + spec.d)


def _selection(name: str, inputs: list[Tensor], ids: Tensor, rows: Sequence[slice], spec: NSASpec) -> Check:
    """What a choice loses against the best in the reference's scores; missing forced or repeated blocks: everything."""
    q, k_cmp = inputs[:2]
    losses = [_selection_loss(q[:, at], k_cmp, ids[:, at], spec, at.start) for at in rows]
    return Check(name, _largest(losses), SELECTION_LIMIT)


def _largest(losses: Sequence[float]) -> float:
    return float(torch.tensor(losses).max())  # NaN if one of them is


def _selection_loss(q: Tensor, k_cmp: Tensor, ids: Tensor, spec: NSASpec, start: int) -> float:
    best = reference.select_blocks(q, k_cmp, spec, start)
    scores_BSGJ = reference.block_scores(q, k_cmp, spec, start).transpose(1, 2)
    same_count = bool(((ids >= 0).sum(-1) == (best >= 0).sum(-1)).all())
    ascending = bool(((ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] < 0)).all())
    newest = torch.arange(start, start + q.shape[1], device=q.device)[None, :, None, None] // spec.l_sel
    forced = all(bool((ids == block.clamp(min=0)).any(-1).all()) for block in (newest * 0, newest, newest - 1))
    if not (same_count and ascending and forced and bool((ids <= newest).all())):
        return float("inf")

    def total(chosen: Tensor) -> Tensor:
        return scores_BSGJ.gather(-1, chosen.clamp(min=0).long()).mul(chosen >= 0).sum(-1)

    return float(((total(best) - total(ids)) / total(best).clamp(min=1e-30)).max())


def _repeats(inputs: list[Tensor], spec: NSASpec, backend: attention.Backend) -> Check:
    """Largest difference between two runs on the same inputs, forward and backward: must be none at all."""

    runs = [out_and_gradients(by_kernels(spec, backend), inputs, inputs[0]) for _ in range(2)]
    return Check("repeat difference", _largest_difference(*runs), 0.0)


def _causality(inputs: list[Tensor], spec: NSASpec, backend: attention.Backend) -> Check:
    """Largest change of any output before a token when everything from that token on changes: must be none at all."""
    tokens = inputs[0].shape[1]
    turn = tokens // 2 + 1
    starts = [turn, *[spec.compressed_blocks(turn)] * 2, *[turn] * 5]
    changed = [torch.cat([x[:, :start], -3 * x[:, start:]], dim=1) for x, start in zip(inputs, starts, strict=True)]
    outs = [by_kernels(spec, backend)(*x)[:, :turn] for x in (inputs, changed)]
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
