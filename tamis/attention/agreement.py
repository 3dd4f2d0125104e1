"""Outputs and gradients of the kernels next to those of the reference, on the same random inputs.

Each comparison is of a sequence that is the last of a batch, or of documents that are the last of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis.attention import functional as attention
from tamis.attention import reference
from tamis.attention.packing import documents
from tamis.attention.spec import NSASpec

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
CASES = ("compressed", "selected", "window", "whole")
WHOLE = CASES.index("whole")
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


@dataclass(frozen=True)
class Call:
    """How the kernels get inputs: as the last of `times` sequences of a batch, or of so many repetitions in a row.

    With `cu_seqlens` the inputs are packed documents, and a row repeats them. `max_seqlen` is that of `nsa_attention`.
    """

    spec: NSASpec
    backend: attention.Backend
    times: int = 1
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None

    @property
    def packs_several(self) -> bool:
        return self.cu_seqlens is not None and len(self.cu_seqlens) > 2

    def out_and_gradients(self, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
        if self.cu_seqlens is None:
            *many, many_dout = (behind_others(x, self.times, 0) for x in (*inputs, dout))
            return [x[-1:] for x in out_and_gradients(by_kernels(self.spec, self.backend), many, many_dout)]
        attend = by_kernels(self.spec, self.backend, cu_seqlens=self._offsets(), max_seqlen=self.max_seqlen)
        got = out_and_gradients(attend, self._row(inputs), behind_others(dout, self.times, 1))
        before = [(self.times - 1) * n for n in (dout.shape[1], *self._sizes(inputs))]
        return [x[:, n : n + y.shape[1]] for x, n, y in zip(got, before, (dout, *inputs), strict=True)]

    def chosen_blocks(self, inputs: list[Tensor]) -> Tensor:
        """The kernels' choice, as `select_blocks` returns it; in a row it counts from each document's first block."""
        if self.cu_seqlens is None:
            q, k_cmp = (behind_others(x, self.times, 0) for x in inputs[:2])
            return attention.select_blocks(q, k_cmp, self.spec, backend=self.backend)[-1:]
        q, k_cmp = self._row(inputs)[:2]
        ids = attention.select_blocks(
            q, k_cmp, self.spec, backend=self.backend, cu_seqlens=self._offsets(), max_seqlen=self.max_seqlen
        )
        return ids[:, -inputs[0].shape[1] :]

    def _row(self, inputs: list[Tensor]) -> list[Tensor]:
        """The repetitions one after the other, with unused slots behind all compressed blocks."""
        row = [behind_others(x[:, :n], self.times, 1) for x, n in zip(inputs, self._sizes(inputs), strict=True)]
        room = self.spec.compressed_blocks(row[0].shape[1])
        row[1:3] = (torch.cat((x, x.new_ones(1, room - x.shape[1], *x.shape[2:])), dim=1) for x in row[1:3])
        return row

    def _sizes(self, inputs: list[Tensor]) -> list[int]:
        """What one repetition takes of each input: all tokens, and the compressed blocks of its documents."""
        assert self.cu_seqlens is not None
        tokens = inputs[0].shape[1]
        *_, (_, last_blocks) = documents(self.cu_seqlens, tokens, self.spec)
        return [last_blocks.stop if name in ("k_cmp", "v_cmp") else tokens for name in INPUTS]

    def _offsets(self) -> Tensor:
        assert self.cu_seqlens is not None
        ends = self.cu_seqlens
        return torch.cat([ends[:-1] + i * ends[-1] for i in range(self.times)] + [ends[-1:] * self.times])


def compare_with_reference(
    case: str,
    branch: int,
    inputs: list[Tensor],
    call: Call,
    ids: Tensor,
    rows: Sequence[slice] = (),
) -> list[Check]:
    """Compare a call of the kernels with the reference on these inputs alone.

    `ids` are the blocks that the kernels choose, which the reference takes: scores of two blocks can differ by rounding
    alone, and the choice is compared apart. `rows` are the tokens to compare, by default all: one slice that begins at
    token 0, and perhaps another that ends with the last token. Of two slices the larger error counts.
    """
    rows = rows or [slice(0, inputs[0].shape[1])]
    generator = torch.Generator().manual_seed(1 + branch)
    dout = torch.zeros_like(inputs[0])
    for at in rows:
        dout[:, at] = torch.randn(dout[:, at].shape, generator=generator).to(dout)

    # The reference takes the same rounded inputs, but in float32: its gradients are not rounded to half precision.
    expected = out_and_gradients(_reference(call, rows, ids), [x.float() for x in inputs], _at(rows, dout).float())
    out, *gradients = call.out_and_gradients(inputs, dout)
    measured = [_at(rows, out), *gradients]
    blocks = call.spec.compressed_blocks(rows[0].stop)
    checks = []
    for name, got, want in zip(("out", *(f"d{x}" for x in INPUTS)), measured, expected, strict=True):
        if branch == WHOLE or BRANCH_OF.get(name[1:], branch) == branch:
            first = blocks if name in ("dk_cmp", "dv_cmp") else rows[0].stop
            checks.append(Check(f"{case} {name}", larger_error(got, want, first), LIMIT[inputs[0].dtype]))
    return checks


def larger_error(measured: Tensor, expected: Tensor, first: int) -> float:
    """Of the `first` tokens or blocks and of those behind them, which would count for little in a norm of both."""
    parts = (slice(first), slice(first, None))
    return max(relative_rmse(measured[:, part], expected[:, part]) for part in parts)


def behind_others(x: Tensor, times: int, dim: int) -> Tensor:
    """`x` as the last of so many along a dimension; the others have its tokens in reverse order."""
    return torch.cat([x.flip(1)] * (times - 1) + [x], dim) if times > 1 else x


def by_kernels(spec: NSASpec, backend: attention.Backend, **row: Any) -> Callable[..., Tensor]:
    return partial(attention.nsa_attention, spec=spec, backend=backend, **row)


def _reference(call: Call, rows: Sequence[slice], ids: Tensor) -> Callable[..., Tensor]:
    """The reference for tokens at `rows`, one slice after the other."""
    cu_seqlens = call.cu_seqlens if call.packs_several else None
    attend: Callable[..., Tensor] = partial(reference.nsa_attention, spec=call.spec, cu_seqlens=cu_seqlens)

    def of_rows(q: Tensor, *others: Tensor) -> Tensor:
        *keys, gates = others
        outputs = [attend(q[:, at], *keys, gates[:, at], block_ids=ids[:, at], start=at.start) for at in rows]
        return torch.cat(outputs, dim=1)

    return of_rows


def _at(rows: Sequence[slice], x: Tensor) -> Tensor:
    return torch.cat([x[:, at] for at in rows], dim=1)


def out_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
