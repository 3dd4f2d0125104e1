"""Triton: write new tokens to a layer's caches, in two launches for a tile of a prompt and for a decode step alike.

`_compress_kernel` computes the compressed keys and values of the blocks that end among the new tokens, from them and
from the tail's ring. Then `_write_kernel` rotates queries and keys in place and writes keys and values to the caches.

Shapes: B sequences, S new tokens of each, C heads in all (queries; keys and values of each branch), D head dim.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.cache import NSACache
from tamis.attention.compress import LearnedCompression
from tamis.attention.kernels.launch import cdiv, next_power_of_2, padded, precision, read_start, start_argument
from tamis.attention.spec import DeviceStart, Start, latest_start

if TYPE_CHECKING:
    from tamis.attention.layer import NSAAttention
    from tamis.attention.rotary import Rotary

BLOCKS = 16  # compressed by one program
MATRIX_BYTES = 16384  # of a weight tile
WARPS, STAGES = 4, 3


class HasHeads(Protocol):
    """The fields of a layer that its caches depend on."""

    heads: int
    groups: int
    rotary: Rotary


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["S", "start", "blocks", "rows"])
def _compress_kernel(
    heads, tail, compressed, positions, cos, sin, place_k, hidden_k, bias_k, out_k, out_bias_k,
    place_v, hidden_v, bias_v, out_v, out_bias_v, S, start, blocks, rows, stride_tb, stride_cb,
    L: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compress a row per group and block: the first block that ends in a tile and `blocks` − 1 more; in a step, ≤ 1."""
    is_k = tl.program_id(1) == 0
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    alive = row < rows
    sequence, group = (row // (blocks * G)).to(tl.int64), row % G
    if start is None:
        now = tl.load(positions + sequence, mask=alive, other=0).to(tl.int32)
        first_token = now + 1 - L
        alive = alive & (first_token >= 0) & (first_token % STRIDE == 0)
        block = tl.where(alive, first_token // STRIDE, 0)
    else:
        start = read_start(start)
        now = tl.full([BM], 0, tl.int32) + start
        block = tl.maximum((start - L + STRIDE) // STRIDE, 0) + row // G % blocks
        first_token = block * STRIDE
        alive = alive & (first_token + L <= start + S)
    place = tl.where(is_k, place_k, place_v)
    hidden = tl.where(is_k, hidden_k, hidden_v)
    column = tl.arange(0, DP)
    kv_head = tl.where(is_k, 0, G) + group
    from_tile = heads + (sequence * S - now) * (C * D) + (H + kv_head) * D  # + token · C · D
    from_tail = tail + sequence * stride_tb + kv_head * D
    acc = tl.zeros([BM, DP], tl.float32)
    # Most steps end no block and read nothing here.
    for first in range(0, tl.where(tl.max(alive.to(tl.int32), 0) > 0, L * D, 0), BK):
        k = first + tl.arange(0, BK)
        token = first_token[:, None] + (k // D)[None, :]
        inside = (k < L * D)[None, :]
        at = tl.where(
            token >= now[:, None], from_tile[:, None] + token.to(tl.int64) * (C * D),
            from_tail[:, None] + token % L * (2 * G * D),
        ) + (k % D)[None, :]  # fmt: skip
        x = tl.load(at, mask=alive[:, None] & inside, other=0.0)
        placed = x.to(tl.float32) + tl.load(place + k, mask=k < L * D, other=0.0).to(tl.float32)[None, :]
        at_weight = hidden + column[:, None] * (L * D) + k[None, :]
        weight = tl.load(at_weight, mask=(column < D)[:, None] & inside, other=0.0)
        acc = tl.dot(placed.to(x.dtype), tl.trans(weight), acc, input_precision=PRECISION)
    bias = tl.load(tl.where(is_k, bias_k, bias_v) + column, mask=column < D, other=0.0).to(tl.float32)
    acc += bias[None, :]
    middle = (acc * tl.sigmoid(acc)).to(heads.dtype.element_ty)
    # The last matrix is applied in halves, because rotation mixes the halves of a key.
    half = tl.arange(0, HALF)
    there = half < D // 2
    out, out_bias = tl.where(is_k, out_k, out_v), tl.where(is_k, out_bias_k, out_bias_v)
    at_out = out + half[:, None] * D + column[None, :]
    mask = there[:, None] & (column < D)[None, :]
    first = tl.dot(middle, tl.trans(tl.load(at_out, mask=mask, other=0.0)), input_precision=PRECISION)
    second = tl.dot(middle, tl.trans(tl.load(at_out + D // 2 * D, mask=mask, other=0.0)), input_precision=PRECISION)
    first += tl.load(out_bias + half, mask=there, other=0.0).to(tl.float32)[None, :]
    second += tl.load(out_bias + D // 2 + half, mask=there, other=0.0).to(tl.float32)[None, :]
    kept = alive[:, None] & there[None, :]
    angle = (block * STRIDE + L - 1)[:, None] * (D // 2) + half[None, :]  # at the block's last token
    c = tl.load(cos + angle, mask=kept & is_k, other=1.0)
    s = tl.load(sin + angle, mask=kept & is_k, other=0.0)
    first, second = _rotate(first.to(heads.dtype.element_ty), second.to(heads.dtype.element_ty), c, s)
    at = compressed + (sequence * stride_cb + block.to(tl.int64) * (2 * G * D) + kv_head * D)[:, None] + half[None, :]
    tl.store(at, first.to(compressed.dtype.element_ty), mask=kept)
    tl.store(at + D // 2, second.to(compressed.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["S", "start", "older", "W"])
def _write_kernel(
    heads, positions, cos, sin, kept, ring, recent, tail, S, start, older, W, stride_kb, stride_rb, stride_tb,
    L: tl.constexpr, C: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, NSA: tl.constexpr,
):  # fmt: skip
    """Write one token. `heads`: queries, (NSA) unrotated key and value, then key and value of each cached branch."""
    n = tl.program_id(0).to(tl.int64)
    sequence, s = n // S, (n % S).to(tl.int32)
    position = tl.load(positions + sequence).to(tl.int32) if start is None else read_start(start) + s
    heads += n * (C * D)
    half = tl.arange(0, HALF)[None, :]
    there = half < D // 2
    c = tl.load(cos + position.to(tl.int64) * (D // 2) + half, mask=there, other=0.0)
    t = tl.load(sin + position.to(tl.int64) * (D // 2) + half, mask=there, other=0.0)
    h = tl.arange(0, HP)[:, None]
    at = heads + h * D + half
    first = tl.load(at, mask=(h < H) & there, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=(h < H) & there, other=0.0).to(tl.float32)
    first, second = _rotate(first, second, c, t)
    tl.store(at, first.to(heads.dtype.element_ty), mask=(h < H) & there)
    tl.store(at + D // 2, second.to(heads.dtype.element_ty), mask=(h < H) & there)

    k = tl.arange(0, GP)[:, None]  # keys, then values, of each group; in NSA for two branches
    mask = (k < (4 * G if NSA else 2 * G)) & there
    at = heads + ((H + 2 * G if NSA else H) + k) * D + half
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)
    is_key = k // G % 2 == 0
    first, second = _rotate(first, second, tl.where(is_key, c, 1.0), tl.where(is_key, t, 0.0))
    first, second = first.to(kept.dtype.element_ty), second.to(kept.dtype.element_ty)
    to = kept + sequence * stride_kb + position.to(tl.int64) * (2 * G * D) + k * D + half
    tl.store(to, first, mask=mask & (k < 2 * G))
    tl.store(to + D // 2, second, mask=mask & (k < 2 * G))
    if NSA:
        in_window = mask & (k >= 2 * G)
        offset = (k - 2 * G) * D + half
        if recent is not None:
            to = recent + (sequence * (older + S) + older + s) * (2 * G * D) + offset
            tl.store(to, first, mask=in_window)
            tl.store(to + D // 2, second, mask=in_window)
        to = ring + sequence * stride_rb + position % W * (2 * G * D) + offset
        tl.store(to, first, mask=in_window & (s >= S - W))
        tl.store(to + D // 2, second, mask=in_window & (s >= S - W))
        raw = (k < 2 * G) & there & (s >= S - L)
        at = heads + (H + k) * D + half
        to = tail + sequence * stride_tb + position % L * (2 * G * D) + k * D + half
        tl.store(to, tl.load(at, mask=raw, other=0.0), mask=raw)
        tl.store(to + D // 2, tl.load(at + D // 2, mask=raw, other=0.0), mask=raw)


@triton.jit(do_not_specialize=["start", "older", "W"])
def _unroll_kernel(ring, window, start, older, W, stride_rb, stride_wb, ROW: tl.constexpr, ROW_P2: tl.constexpr):
    """Copy one of the tokens before a tile from the ring to the tile's window."""
    n, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, ROW_P2)
    slot = (read_start(start) - older + n) % W
    row = tl.load(ring + sequence * stride_rb + slot * ROW + column, mask=column < ROW)
    tl.store(window + sequence * stride_wb + n * ROW + column, row, mask=column < ROW)


def write_tile(layer: NSAAttention, heads_BSCD: Tensor, cache: NSACache, start: Start) -> tuple[Tensor, Tensor]:
    """Write tokens from `start` on to the cache; return their queries, a view of `heads`, and the window.

    `heads` is overwritten.
    """
    B, S, _, D = heads_BSCD.shape
    older = min(latest_start(start), layer.spec.w - 1)
    window = torch.empty((B, older + S, 2, layer.groups, D), dtype=heads_BSCD.dtype, device=heads_BSCD.device)
    if older:
        ring = cache.window.slots_BW2GD
        _unroll_kernel[(older, B)](
            ring, window, start_argument(start), older, ring.shape[1], ring.stride(0), window.stride(0),
            ROW=2 * layer.groups * D, ROW_P2=next_power_of_2(2 * layer.groups * D), num_warps=WARPS,
        )  # fmt: skip
    _compress(layer, heads_BSCD, cache, start)
    _write(layer, heads_BSCD, cache.selected_BT2GD, start, cache, window)
    return heads_BSCD[:, :, : layer.heads], window


def write_token(layer: NSAAttention, heads_B1CD: Tensor, cache: NSACache, positions_B: Tensor) -> Tensor:
    """Write one token of each sequence to the cache; return their queries, a view of `heads`, which is overwritten."""
    _compress(layer, heads_B1CD, cache, positions_B)
    _write(layer, heads_B1CD, cache.selected_BT2GD, positions_B, cache)
    return heads_B1CD[:, 0, : layer.heads]


def write_dense(layer: HasHeads, heads_BSCD: Tensor, cached_BT2GD: Tensor, at: int | Tensor) -> Tensor:
    """Write tokens of dense attention: `at` is a tile's start, or each sequence's position in a step."""
    _write(layer, heads_BSCD, cached_BT2GD, at)
    return heads_BSCD[:, :, : layer.heads]


def _compress(layer: NSAAttention, heads_BSCD: Tensor, cache: NSACache, at: Start | Tensor) -> None:
    """Compress the blocks that end among the new tokens, whose heads are unrotated; the tail holds earlier tokens."""
    B, S, C, D = heads_BSCD.shape
    spec, G, DP = layer.spec, layer.groups, padded(D)
    positions, start = _position(at)
    blocks = 1 if start is None else cdiv(S, spec.d)  # the most that can end in S tokens
    matrices = [
        x.contiguous()
        for c in cast(tuple[LearnedCompression, ...], (layer.compress_k, layer.compress_v))
        for x in (c.place, c.hidden.weight, c.hidden.bias, c.out.weight, c.out.bias)
    ]
    _compress_kernel[(cdiv(B * blocks * G, BLOCKS), 2)](
        heads_BSCD, cache.tail.slots_BW2GD, cache.compressed_BN2GD, positions, layer.rotary.cos, layer.rotary.sin,
        *matrices, S, start, blocks, B * blocks * G,
        cache.tail.slots_BW2GD.stride(0), cache.compressed_BN2GD.stride(0),
        L=spec.l, STRIDE=spec.d, C=C, H=layer.heads, G=G, D=D, DP=DP, HALF=max(16, DP // 2),
        PRECISION=precision(heads_BSCD.dtype), BM=BLOCKS, BK=max(16, MATRIX_BYTES // (DP * heads_BSCD.itemsize)),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def _position(at: Start | Tensor) -> tuple[Tensor | None, int | Tensor | None]:
    """Return (each sequence's position, None) for a step, (None, start) for a tile."""
    if isinstance(at, Tensor):
        return at, None
    return None, at.where if isinstance(at, DeviceStart) else at


def _write(
    layer: HasHeads,
    heads_BSCD: Tensor,
    cached_BT2GD: Tensor,
    at: Start | Tensor,
    cache: NSACache | None = None,
    window_BT2GD: Tensor | None = None,
) -> None:
    """Rotate queries and keys; write to the cache of all tokens and, for NSA, to the rings and the tile's window."""
    B, S, C, D = heads_BSCD.shape
    G, H = layer.groups, layer.heads
    positions, start = _position(at)
    ring, tail = (cache.window.slots_BW2GD, cache.tail.slots_BW2GD) if cache else (cached_BT2GD, cached_BT2GD)
    older = 0 if window_BT2GD is None else window_BT2GD.shape[1] - S
    _write_kernel[(B * S,)](
        heads_BSCD, positions, layer.rotary.cos, layer.rotary.sin, cached_BT2GD, ring, window_BT2GD, tail,
        S, start, older, ring.shape[1], cached_BT2GD.stride(0), ring.stride(0), tail.stride(0),
        L=cache.spec.l if cache else 1, C=C, H=H, HP=next_power_of_2(H), G=G,
        GP=next_power_of_2((4 if cache else 2) * G), D=D, HALF=max(16, padded(D) // 2), NSA=cache is not None,
        num_warps=WARPS,
    )  # fmt: skip
