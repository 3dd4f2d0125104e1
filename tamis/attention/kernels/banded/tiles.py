"""Triton: what the kernels of `banded` share: which keys a token sees, and tiles of rows and of keys.

Rows of a tile are (token, head of the group) pairs, token by token: one tile of keys serves every head of the group and
no group size is padded. Shapes as in `banded`.

A tile is copied by the GPU's tensor memory accelerator where its tensor comes as a descriptor (COPIED), else read
through pointers. Copies need neither registers nor instructions for addresses; at head dim 128 that decides what fits.

Two stages of copies are all that fits, and Triton issues the next tile's last in a loop and waits for them first in the
next round. It moves an `if` behind them: so the loops over copied tiles have all but the loads in an `if` that always
holds, which the compiler does not know. It reads ahead for an `if` where the loop itself names its stages. What is used
transposed alone is transposed before the `if`, or it would take one buffer more.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.attention.kernels.launch import padded


@triton.jit
def place(tiles, G):
    """This program's tile of rows, sequence and group; groups lie next to each other, then tiles, then sequences.

    Programs that run together then read neighbouring rows and few sequences' keys. Of a sequence the last tokens see
    the most keys: longest first.
    """
    rest = tl.program_id(0) // G
    return tiles - 1 - rest % tiles, rest // tiles, tl.program_id(0) % G


@triton.jit
def keys_begun(token, W: tl.constexpr):
    """First key the token's window holds."""
    return tl.maximum(token - W + 1, 0) if W > 0 else token * 0


@triton.jit
def keys_ended(token, L: tl.constexpr, STRIDE: tl.constexpr):
    """Keys that end at or before the token."""
    return tl.maximum((token + 1 - L + STRIDE) // STRIDE, 0)


@triton.jit
def visible(token, key, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    seen = key < keys_ended(token, L, STRIDE)
    if W > 0:
        seen = seen & (key >= keys_begun(token, W))
    return seen


@triton.jit
def key_tiles(t_first, t_last, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, BN: tl.constexpr):
    """The keys of tokens t_first…t_last as tiles from `begin`: tiles, and which of them every token sees whole.

    The least of both ends is always the first; it was measured so, and compiles to code that spills without.
    """
    begin, end = keys_begun(t_first, W), keys_ended(t_last, L, STRIDE)
    tiles = tl.cdiv(end - begin, BN)
    whole_first = tl.cdiv(keys_begun(t_last, W) - begin, BN)
    whole_end = (tl.minimum(keys_ended(t_first, L, STRIDE), end) - begin) // BN
    return begin, tiles, whole_first, whole_end


@triton.jit
def rows_from(first, S, R: tl.constexpr, BM: tl.constexpr):
    """The tile's first token, then for each row its distance from it, its head of the group, and whether it exists.

    Addresses are a 64-bit place for the tile plus 32-bit distances within it: half the registers, and 1M tokens fit.
    """
    t0 = first // R
    local = tl.arange(0, BM) if BM % R == 0 else first - t0 * R + tl.arange(0, BM)
    away = local // R
    return t0, away, local - away * R, away < S - t0


@triton.jit
def load_rows(x, t0, away, head, alive, stride_s, stride_h, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    column = tl.arange(0, DP)
    address = x + t0.to(tl.int64) * stride_s + ((away * stride_s + head * stride_h)[:, None] + column[None, :])
    if MASKED:
        mask = alive[:, None] if D == DP else alive[:, None] & (column < D)[None, :]
        return tl.load(address, mask=mask, other=0.0)
    if D == DP:
        return tl.load(address)
    return tl.load(address, mask=(column < D)[None, :], other=0.0)


@triton.jit
def load_keys(x, b, g, first, N, stride_n, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, COPIED: tl.constexpr):
    """BN keys from `first` on, zeros past the last: of batch b and group g if COPIED, else of those x points to."""
    return tl.reshape(x.load([b, first, g, 0]), [BN, DP]) if COPIED else _read_keys(x, first, N, stride_n, D, DP, BN)


@triton.jit
def _read_keys(x, first, N, stride_n, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    key = tl.arange(0, BN)
    column = tl.arange(0, DP)
    address = x + first.to(tl.int64) * stride_n + (key[:, None] * stride_n + column[None, :])
    mask = (first + key < N)[:, None]
    return tl.load(address, mask=mask if D == DP else mask & (column < D)[None, :], other=0.0)


def described_keys(x: Tensor, keys: int, copied: bool) -> Tensor | TensorDescriptor:
    """Keys or values `[B,N,G,D]` as a kernel takes them."""
    return TensorDescriptor(x, [*x.shape], [*x.stride()], [1, keys, 1, padded(x.shape[3])]) if copied else x
