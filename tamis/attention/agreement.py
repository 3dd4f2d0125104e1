"""Outputs and gradients of the kernels next to those of the reference, on the same random inputs.

Each comparison is of a sequence that is the last of a batch, or of documents that are the last of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tamis.attention import functional as attention
from tamis.attention import reference
from tamis.attention.packing import documents
from tamis.attention.spec import NSASpec

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
WHOLE = 3  # the number of the case with all branches
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
    shapes = [(batch, tokens, heads, dim), *((batch, n, groups, dim) for n in lengths)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    gates = torch.sigmoid(torch.randn((batch, tokens, heads, 3), generator=generator))
    return [*tensors, gates.to(device, dtype)]


def relative_rmse(measured: Tensor, expected: Tensor) -> float:
    """`‖measured − expected‖ / ‖expected‖`; infinite where anything is not finite, 0 for two empty or zero tensors."""
    measured, expected = measured.double(), expected.double()
    if not (torch.isfinite(measured).all() and torch.isfinite(expected).all()):
        return float("inf")
    error, size = (measured - expected).norm().item(), expected.norm().item()
    return error / size if size else (0.0 if error == 0 else float("inf"))


def compare_with_reference(
    case: str,
    branch: int,
    inputs: list[Tensor],
    spec: NSASpec,
    backend: attention.Backend,
    cu_seqlens: Tensor | None = None,
    times: int = 1,
    max_seqlen: int = 0,
    rows: Sequence[slice] = (),
    ids: Tensor | None = None,
) -> list[Check]:
    """Compare inputs, as the last of so many in a batch or a row, with the reference on these inputs alone.

    Without `cu_seqlens`, `rows` are the tokens to compare, by default all: those from 0 on, and others up to the last.
    """
    rows = rows or [slice(0, inputs[0].shape[1])]
    generator = torch.Generator().manual_seed(1 + branch)
    dout = torch.randn(inputs[0].shape, generator=generator).to(inputs[0])
    for before, after in pairwise(rows):
        dout[:, before.stop : after.start] = 0

    # The reference takes the same rounded inputs, but in float32: its gradients are not rounded to half precision.
    exact = [x.float() for x in inputs]
    expected = out_and_gradients(_reference(spec, cu_seqlens, rows, ids), exact, _at(rows, dout).float())
    last = _last_of_batch if cu_seqlens is None else partial(_last_of_row, cu_seqlens, max_seqlen)
    out, *gradients = last(inputs, dout, spec, backend, times)
    measured = [_at(rows, out), *gradients]
    return [
        Check(f"{case} {name}", relative_rmse(got, want), LIMIT[inputs[0].dtype])
        for name, got, want in zip(("out", *(f"d{x}" for x in INPUTS)), measured, expected, strict=True)
        if branch == WHOLE or BRANCH_OF.get(name[1:], branch) == branch
    ]


def _last_of_batch(
    inputs: list[Tensor], dout: Tensor, spec: NSASpec, backend: attention.Backend, batch: int
) -> list[Tensor]:
    """Output and gradients of a sequence that is the last of a batch."""
    *many, many_dout = (behind_others(x, batch, 0) for x in (*inputs, dout))
    return [x[-1:] for x in out_and_gradients(by_kernels(spec, backend), many, many_dout)]


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
    dout_row, *row = (behind_others(x[:, :n], times, 1) for x, n in zip((dout, *inputs), used, strict=True))
    room = spec.compressed_blocks(tokens * times)
    row[1:3] = (torch.cat((x, x.new_ones(1, room - x.shape[1], *x.shape[2:])), dim=1) for x in row[1:3])
    offsets = torch.cat([cu_seqlens[:-1] + i * tokens for i in range(times)] + [cu_seqlens[-1:] * times])
    got = out_and_gradients(by_kernels(spec, backend, cu_seqlens=offsets, max_seqlen=max_seqlen), row, dout_row)
    before = [(times - 1) * n for n in used]
    return [x[:, n : n + y.shape[1]] for x, n, y in zip(got, before, (dout, *inputs), strict=True)]


def behind_others(x: Tensor, times: int, dim: int) -> Tensor:
    """`x` as the last of so many along a dimension; the others have its tokens in reverse order."""
    return torch.cat([x.flip(1)] * (times - 1) + [x], dim) if times > 1 else x


def by_kernels(spec: NSASpec, backend: attention.Backend, **row: Any) -> Callable[..., Tensor]:
    return partial(attention.nsa_attention, spec=spec, backend=backend, **row)


def _reference(
    spec: NSASpec, cu_seqlens: Tensor | None, rows: Sequence[slice], ids: Tensor | None
) -> Callable[..., Tensor]:
    """The reference for tokens at `rows`, one slice after the other, with a choice of blocks for all tokens if any."""

    attend: Callable[..., Tensor] = partial(reference.nsa_attention, spec=spec, cu_seqlens=cu_seqlens)

    def of_rows(q: Tensor, *others: Tensor) -> Tensor:
        *keys, gates = others
        choices = [None if ids is None else ids[:, at] for at in rows]
        outputs = [
            attend(q[:, at], *keys, gates[:, at], block_ids=choice, start=at.start)
            for at, choice in zip(rows, choices, strict=True)
        ]
        return torch.cat(outputs, dim=1)

    return of_rows


def _at(rows: Sequence[slice], x: Tensor) -> Tensor:
    return torch.cat([x[:, at] for at in rows], dim=1)


def out_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
