"""Gluon: forward, and dk and dv, of the compressed and the window branch on Hopper, where `specializes_warps` holds.

One warp of a program does nothing but copy tiles into shared memory, by the tensor memory accelerator. The others
multiply, four warps for each tile of 64 rows. Every slot of a ring of tiles has two barriers: one is passed when the
slot is full, the other when it is empty. So copies never wait for products, and no register holds an address. In dk and
dv the sums of a round are under way while the next round's scores are computed.

Rows are 64 tokens of one head, so that a tile of a tensor `[B,S,H,D]` is a box of 64 tokens by D numbers. Boxes end
with their sequence: what lies beyond is copied as zeros. Numbers of rows, `[B,H,S]`, are copied in lines of 64 of one
head. A copy begins at a multiple of 16 bytes, or the GPU stops with an illegal instruction: where S is no multiple of
four numbers, the heads are first moved apart.

`queries.py` and `keys.py` have the same in Triton for other shapes and GPUs, and define which keys a token sees. Packed
rows read the same tables.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tamis.attention.kernels.banded.keys import MOST_SPLITS, PROGRAMS_WANTED, sum_splits_kernel
from tamis.attention.kernels.banded.queries import Band, Rows
from tamis.attention.kernels.launch import LOG2E, PASSED_ON, PreparedKernel, cdiv, multiprocessors
from tamis.attention.kernels.softmax_on_hopper import add_to_sums, layout_of_sums, max_of_rows, total_of_sums
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import KEYS_OF_TILE

HEADS = 2  # of a group, that share the keys which a program of the forward kernel copies
FORWARD_STAGES, KEYS_STAGES = 4, 3
FORWARD_PROGRAMS = 2  # on a multiprocessor; in the compressed branch each takes one tile of rows after the other
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
PASSED_ON.add(TensorDescriptor)


@gluon.jit
def _keys_of_token(table, token, L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr):
    """First key that a token sees, and the one after the last."""
    first_token, first_key = token * 0, token * 0
    if table is not None:
        first_token = gl.load(table + 4 * token)
    if W > 0:
        return gl.maximum(token - (W - 1), first_token), token + 1
    if table is not None:
        first_key = gl.load(table + 4 * token + 3)
    return first_key, first_key + gl.maximum((token - first_token + (1 - L + STRIDE)) // STRIDE, 0)


@gluon.jit
def _rows_of_key(table, key, S, L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr):
    """First token that sees a key, and the one after the last."""
    if W > 0:
        end = gl.minimum(key + W, S)
        if table is not None:
            end = gl.minimum(end, gl.load(table + 4 * key + 1))
        return key, end
    if table is not None:
        return gl.load(table + 2 * key), gl.load(table + 2 * key + 1)
    return key * STRIDE + (L - 1), key * 0 + S


@gluon.jit
def _place(work, S, G, R: gl.constexpr, HEADS: gl.constexpr):
    """Sequence, group, first head and first token of a tile of rows; heads are adjacent, then groups, then tokens.

    The last tokens see the most keys: longest first.
    """
    tiles = (S + 63) // 64
    pair = work % (R // HEADS)
    rest = work // (R // HEADS)
    g = rest % G
    rest = rest // G
    return rest // tiles, g, g * R + pair * HEADS, (tiles - 1 - rest % tiles) * 64


@gluon.jit
def _copy_queries_and_keys(
    q, k, v, table, shared, works, S, G,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    held, ring, full, empty, held_full, held_empty = shared
    copied = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        b, g, head, t0 = _place(work, S, G, R, HEADS)
        buffer = taken % 2
        mbarrier.wait(held_empty.index(buffer), (taken // 2 + 1) & 1)
        mbarrier.expect(held_full.index(buffer), HEADS * 64 * D * 2)
        for c in gl.static_range(HEADS):
            into = held.index(buffer * HEADS + c)
            tma.async_copy_global_to_shared(q, [b, t0, (head + c) * D], held_full.index(buffer), into)
        begin, _ = _keys_of_token(table, t0, L, STRIDE, W)
        _, end = _keys_of_token(table, gl.minimum(t0 + 63, S - 1), L, STRIDE, W)
        for tile in range(begin // 64, (end + 63) // 64):
            slot = copied % STAGES
            mbarrier.wait(empty.index(slot), (copied // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), 2 * 64 * D * 2)
            tma.async_copy_global_to_shared(k, [b, tile * 64, g * D], full.index(slot), ring.index(slot * 2))
            tma.async_copy_global_to_shared(v, [b, tile * 64, g * D], full.index(slot), ring.index(slot * 2 + 1))
            copied += 1
        taken += 1


@gluon.jit
def _attend(
    out, lse, scale, table, shared, works, S, G,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, HEAD: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one of the heads."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    held, ring, full, empty, held_full, held_empty = shared
    zero = gl.zeros([64, 64], gl.float32, ACC)
    walked = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        b, _, head, t0 = _place(work, S, G, R, HEADS)
        head += HEAD
        token = t0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
        seen_begin, seen_end = _keys_of_token(table, gl.minimum(token, S - 1), L, STRIDE, W)
        begin, whole_end = _keys_of_token(table, t0, L, STRIDE, W)
        whole_begin, end = _keys_of_token(table, gl.minimum(t0 + 63, S - 1), L, STRIDE, W)
        buffer = taken % 2
        mbarrier.wait(held_full.index(buffer), (taken // 2) & 1)
        q_tile = held.index(buffer * HEADS + HEAD).reshape([64, D])
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
        sums = gl.zeros([64, 8], gl.float32, layout_of_sums())
        acc = gl.zeros([64, D], gl.float32, ACC)
        for tile in range(begin // 64, (end + 63) // 64):
            slot = walked % STAGES
            mbarrier.wait(full.index(slot), (walked // STAGES) & 1)
            k_tile, v_tile = ring.index(slot * 2).reshape([64, D]), ring.index(slot * 2 + 1).reshape([64, D])
            s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if (tile * 64 < whole_begin) | (tile * 64 + 64 > whole_end):
                key = (tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ACC)))[None, :]
                s = gl.where((key >= seen_begin[:, None]) & (key < seen_end[:, None]), s, float("-inf"))
            m_new = gl.maximum(m, max_of_rows(s, gl.SliceLayout(1, ACC)) * scale)
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(s * scale - m_safe[:, None])
            shrink = gl.exp2(m - m_safe)
            sums = add_to_sums(sums, shrink, p)
            m = m_new
            weights = gl.convert_layout(p.to(q_tile.dtype), LEFT)
            acc = warpgroup_mma(weights, v_tile, acc * shrink[:, None], is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(slot))
            walked += 1
        mbarrier.arrive(held_empty.index(buffer))
        total = total_of_sums(sums, gl.SliceLayout(1, ACC))
        nothing = total == 0.0
        total = gl.where(nothing, 1.0, total)
        column = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
        at = ((b.to(gl.int64) * S + token) * (G * R) + head)[:, None] * D + column[None, :]
        gl.store(out + at, (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty), mask=(token < S)[:, None])
        natural = gl.where(nothing, float("-inf"), (m + gl.log2(total)) * 0.6931471805599453)  # ln 2
        gl.store(lse + (b * G * R + head).to(gl.int64) * S + token, natural, mask=token < S)
        taken += 1


@PreparedKernel
@gluon.jit(do_not_specialize=["works", "S", "G"])
def forward_by_head(
    out, lse, table, q, k, v, works, S, G, scale,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """q, k and v are descriptors of [B,tokens,heads·D]. Programs share `works` tiles of 64 tokens of HEADS heads."""
    held = gl.allocate_shared_memory(q.dtype, [2 * HEADS, 1, 64, D], q.layout)
    ring = gl.allocate_shared_memory(q.dtype, [STAGES * 2, 1, 64, D], q.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    held_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HEADS)
    for i in gl.static_range(2):
        mbarrier.init(held_full.index(i), count=1)
        mbarrier.init(held_empty.index(i), count=HEADS)
    fence_async_shared()
    shared = (held, ring, full, empty, held_full, held_empty)
    gl.warp_specialize([
        (_attend, (out, lse, scale, table, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS, 0)),
        (_attend, (out, lse, scale, table, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS, 1)),
        (_copy_queries_and_keys, (q, k, v, table, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS)),
    ], [4, 1], [104, 24])  # fmt: skip


@gluon.jit
def _copy_rows(
    q, dout, lse, gate, delta, shared, b, head, first, count, H,
    R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_ring, dout_ring, statistics, full, empty = shared
    for step in range(count):
        slot = step % STAGES
        t0 = (first + step) // R * 64
        h = head + (first + step) % R
        line = [b * H + h, t0]
        mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * 64 * D * 2 + 3 * 64 * 4)
        tma.async_copy_global_to_shared(q, [b, t0, h * D], bar, q_ring.index(slot))
        tma.async_copy_global_to_shared(dout, [b, t0, h * D], bar, dout_ring.index(slot))
        tma.async_copy_global_to_shared(lse, line, bar, statistics.index(slot * 4))
        tma.async_copy_global_to_shared(gate, line, bar, statistics.index(slot * 4 + 1))
        tma.async_copy_global_to_shared(delta, line, bar, statistics.index(slot * 4 + 2))


@gluon.jit
def _add_rows(
    dk_out, dv_out, table, k_tile, v_tile, shared, part, g, G, first_key, keys, first,
    count, whole_begin, whole_end, S, N, softmax_scale, scale,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of the keys from `first_key` on. Scores are [keys, rows]: p and ds go from registers into the sums."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    q_ring, dout_ring, statistics, full, empty = shared
    key = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    seen_begin, seen_end = _rows_of_key(table, gl.minimum(key, N - 1), S, L, STRIDE, W)
    dk = warpgroup_mma_init(gl.zeros([64, D], gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros([64, D], gl.float32, ACC))
    zero = gl.zeros([64, 64], gl.float32, ACC)
    for step in range(count):
        slot = step % STAGES
        t0 = (first + step) // R * 64
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        q_tile, dout_tile = q_ring.index(slot).reshape([64, D]), dout_ring.index(slot).reshape([64, D])
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s, dk, dv = warpgroup_mma_wait(1, deps=(s, dk, dv))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)  # the sums of the last round are done
        p = gl.exp2(s * scale - statistics.index(slot * 4).reshape([64]).load(ROWS)[None, :] * 1.4426950408889634)
        if (t0 < whole_begin) | (t0 + 64 > whole_end):
            token = (t0 + gl.arange(0, 64, layout=ROWS))[None, :]
            p = gl.where((token >= seen_begin[:, None]) & (token < seen_end[:, None]), p, 0.0)
        gates = statistics.index(slot * 4 + 1).reshape([64]).load(ROWS)[None, :]
        weights = gl.convert_layout((p * gates).to(q_tile.dtype), LEFT)
        deltas = statistics.index(slot * 4 + 2).reshape([64]).load(ROWS)[None, :]
        dp = warpgroup_mma_wait(0, deps=(dp,))
        dv = warpgroup_mma(weights, dout_tile, dv, is_async=True)
        ds = gl.convert_layout((p * (dp * gates - deltas)).to(q_tile.dtype), LEFT)
        dk = warpgroup_mma(ds, q_tile, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    at = ((part * N + key) * G + g)[:, None] * D + gl.arange(0, D, layout=ROWS)[None, :]
    mask = (key < keys)[:, None]
    gl.store(dk_out + at, (dk * softmax_scale).to(dk_out.dtype.element_ty), mask=mask)
    gl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=mask)


@gluon.jit
def _store_keys(tile, x, first, keys, stride_n, D: gl.constexpr):
    """Put 64 keys from `first` on into shared memory, zeros past the last."""
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, READ))[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, READ))[None, :]
    address = x + first.to(gl.int64) * stride_n + (key * stride_n + column)
    tile.store(gl.load(address, mask=first + key < keys, other=0.0))


@PreparedKernel
@gluon.jit(do_not_specialize=["B", "S", "N", "SPLITS", "key_tiles"])
def key_gradients_by_head(
    k, v, dk_out, dv_out, table, tiles_of_keys, q, dout, lse, gate, delta,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, B, S, N, SPLITS, softmax_scale, scale, key_tiles,
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys from one split of the rows that see them; outputs are [SPLITS,B,N,G,D].

    q and dout are descriptors of [B,S,H·D], lse, gate and delta of [B·H,S]. The groups are the grid's second part.
    """
    g = gl.program_id(1)
    G = gl.num_programs(1)
    split = gl.program_id(0) * 0
    if W > 0:
        tile, b = gl.program_id(0) % key_tiles, gl.program_id(0) // key_tiles
    else:
        b = gl.program_id(0) % B
        split = gl.program_id(0) // B % SPLITS
        tile = gl.program_id(0) // B // SPLITS  # the first keys are seen by most rows: longest first
    first, keys = tile * 64, N
    if tiles_of_keys is not None:
        first, keys = gl.load(tiles_of_keys + 2 * tile), gl.load(tiles_of_keys + 2 * tile + 1)
    last = gl.minimum(first + 64, keys) - 1
    begin, whole_end = _rows_of_key(table, gl.minimum(first, N - 1), S, L, STRIDE, W)
    whole_begin, end = _rows_of_key(table, gl.maximum(last, 0), S, L, STRIDE, W)
    begin = begin // 64
    rounds = gl.maximum((end + 63) // 64 - begin, 0) * R
    if tiles_of_keys is not None:
        rounds = gl.where(first < keys, rounds, 0)
    mine = rounds * split // SPLITS
    count = rounds * (split + 1) // SPLITS - mine
    mine += begin * R

    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_tile = gl.allocate_shared_memory(q.dtype, [64, D], SWIZZLED)
    v_tile = gl.allocate_shared_memory(q.dtype, [64, D], SWIZZLED)
    _store_keys(k_tile, k + b.to(gl.int64) * stride_kb + g * stride_kg, first, keys, stride_kn, D)
    _store_keys(v_tile, v + b.to(gl.int64) * stride_vb + g * stride_vg, first, keys, stride_vn, D)
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 64, D], q.layout)
    dout_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 64, D], q.layout)
    statistics = gl.allocate_shared_memory(gl.float32, [STAGES * 4, 1, 64], lse.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    part = (split * B + b).to(gl.int64)
    shared = (q_ring, dout_ring, statistics, full, empty)
    gl.warp_specialize([
        (_add_rows, (dk_out, dv_out, table, k_tile, v_tile, shared, part, g, G, first, keys, mine, count, whole_begin,
                     whole_end, S, N, softmax_scale, scale, L, STRIDE, W, R, D, STAGES)),
        (_copy_rows, (q, dout, lse, gate, delta, shared, b, g * R, mine, count, G * R, R, D, STAGES)),
    ], [1], [24])  # fmt: skip


def forward_on_hopper(q: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """As `banded_forward` for queries from position 0 on."""
    B, S, H, D = q.shape
    G = band.k.shape[2]
    out = empty((B, S, H, D), q.dtype, q.device)
    lse = empty((B, H, S), torch.float32, q.device)
    works = B * cdiv(S, 64) * (H // HEADS)
    # The window's programs should make room for what runs next to them: each takes one tile.
    programs = works if band.window else min(works, FORWARD_PROGRAMS * multiprocessors(q.device))
    forward_by_head[(programs,)](
        out, lse, band.documents, *(described_heads(x) for x in (q, band.k, band.v)), works, S, G, band.scale * LOG2E,
        L=band.length, STRIDE=band.stride, W=band.window, R=H // G, D=D, STAGES=FORWARD_STAGES, HEADS=HEADS,
        num_warps=4, maxnreg=80,
    )  # fmt: skip
    return out, lse


def write_key_gradients(q: Tensor, band: Band, rows: Rows, dout: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write what `key_gradients` returns.

    Tables of a packed row list more tiles than there are keys for, and a program without keys still starts its warps:
    all listed tiles count where rows are split to have enough programs.
    """
    B, S, H, D = q.shape
    N, G = band.k.shape[1:3]
    tiles = cdiv(N, KEYS_OF_TILE) if band.tiles_of_keys is None else band.tiles_of_keys.numel() // 2
    splits = 1 if band.window else max(1, min(MOST_SPLITS, PROGRAMS_WANTED // (tiles * B * G)))
    parts = [dk, dv]
    if splits > 1:
        parts = [empty((splits, *dk.shape), torch.float32, dk.device) for _ in range(2)]
    key_gradients_by_head[(tiles * B * splits, G)](
        band.k, band.v, *parts, band.rows_of_key, band.tiles_of_keys, described_heads(q), described_heads(dout),
        *(_described_lines(x) for x in rows), *band.strides, B, S, N, splits, band.scale, band.scale * LOG2E, tiles,
        L=band.length, STRIDE=band.stride, W=band.window, R=H // G, D=D, STAGES=KEYS_STAGES, num_warps=4, maxnreg=128,
    )  # fmt: skip
    if splits > 1:
        sum_splits_kernel[(cdiv(dk.numel(), 1024),)](*parts, dk, dv, dk.numel(), splits, BLOCK=1024)


def described_heads(x: Tensor) -> TensorDescriptor:
    """Boxes of 64 tokens of one head; a batch of one has any stride."""
    B, S, H, D = x.shape
    strides = [x.stride(0) if B > 1 else S * x.stride(1), x.stride(1), 1]
    return _descriptor(x, [B, S, H * D], strides, [1, 64, D], TILE)


def _described_lines(x: Tensor) -> TensorDescriptor:
    """Lines of 64 numbers of one head, of `[B,H,S]`."""
    B, H, S = x.shape
    if S % 4:
        x = F.pad(x, (0, -S % 4))
    return _descriptor(x, [B * H, S], [x.shape[2], 1], [1, 64], LINE)


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> TensorDescriptor:
    """As the constructor, without its checks: `specializes_warps` has made them, and these took most of its time."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, shape, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor
