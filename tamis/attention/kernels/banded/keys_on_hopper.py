"""Gluon: dk and dv of the compressed and the window branch on Hopper, where `copies_rows_of_heads` holds.

The same kernel has the selected branch's prefixes (`selected/backward.py`), whose tokens see one run of keys too.

One warp of a program does nothing but copy tiles into shared memory, by the tensor memory accelerator. Four others
multiply. Every slot of a ring of tiles has two barriers: one is passed when the slot is full, the other when it is
empty. So copies never wait for products, and no register holds an address. The sums of a round are under way while the
next round's scores are computed.

Rows are 64 tokens of one head. `keys.py` has the same in Triton for other shapes and GPUs, and packed rows read the
same tables.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
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

from tamis.attention.kernels.banded.keys import MOST_SPLITS, PROGRAMS_WANTED, sum_splits_kernel
from tamis.attention.kernels.banded.queries import Band, Rows
from tamis.attention.kernels.hopper.barriers import barriers_of_ring
from tamis.attention.kernels.hopper.descriptors import described_heads, described_lines
from tamis.attention.kernels.launch import LOG2E, PreparedKernel, cdiv
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import KEYS_OF_TILE

STAGES = 3


@gluon.jit
def _rows_of_key(table, key, S, L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, IS_PREFIX: gl.constexpr):
    """First token that sees a key, and the one after the last."""
    if W > 0:
        begin = key
        if IS_PREFIX:
            begin = key * 0
            if table is not None:
                begin = gl.load(table + 4 * key)
        end = gl.minimum(begin + W, S)
        if table is not None:
            end = gl.minimum(end, gl.load(table + 4 * key + 1))
        return key, end
    if table is not None:
        return gl.load(table + 2 * key), gl.load(table + 2 * key + 1)
    return key * STRIDE + (L - 1), key * 0 + S


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
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, IS_PREFIX: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of the keys from `first_key` on. Scores are [keys, rows]: p and ds go from registers into the sums."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    q_ring, dout_ring, statistics, full, empty = shared
    key = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    seen_begin, seen_end = _rows_of_key(table, gl.minimum(key, N - 1), S, L, STRIDE, W, IS_PREFIX)
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
    L: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr, IS_PREFIX: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
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
    begin, whole_end = _rows_of_key(table, gl.minimum(first, N - 1), S, L, STRIDE, W, IS_PREFIX)
    whole_begin, end = _rows_of_key(table, gl.maximum(last, 0), S, L, STRIDE, W, IS_PREFIX)
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
    full, empty = barriers_of_ring(STAGES, 1)
    fence_async_shared()
    part = (split * B + b).to(gl.int64)
    shared = (q_ring, dout_ring, statistics, full, empty)
    gl.warp_specialize([
        (_add_rows, (dk_out, dv_out, table, k_tile, v_tile, shared, part, g, G, first, keys, mine, count, whole_begin,
                     whole_end, S, N, softmax_scale, scale, L, STRIDE, W, IS_PREFIX, R, D, STAGES)),
        (_copy_rows, (q, dout, lse, gate, delta, shared, b, g * R, mine, count, G * R, R, D, STAGES)),
    ], [1], [24])  # fmt: skip


def write_key_gradients(q: Tensor, band: Band, rows: Rows, dout: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write what `key_gradients` returns; of a `prefix` that is not packed, gradients of its keys alone.

    Tables of a packed row list more tiles than there are keys for, and a program without keys still starts its warps:
    all listed tiles count where rows are split to have enough programs.
    """
    B, S, H, D = q.shape
    N, G = band.k.shape[1:3]
    tiles = cdiv(N, KEYS_OF_TILE) if band.tiles_of_keys is None else band.tiles_of_keys.numel() // 2
    if band.is_prefix and band.rows_of_key is None:
        tiles = min(tiles, cdiv(band.window, KEYS_OF_TILE))
    splits = 1 if band.window else max(1, min(MOST_SPLITS, PROGRAMS_WANTED // (tiles * B * G)))
    parts = [dk, dv]
    if splits > 1:
        parts = [empty((splits, *dk.shape), torch.float32, dk.device) for _ in range(2)]
    key_gradients_by_head[(tiles * B * splits, G)](
        band.k, band.v, *parts, band.rows_of_key, band.tiles_of_keys, described_heads(q), described_heads(dout),
        *(described_lines(x) for x in rows), *band.strides, B, S, N, splits, band.scale, band.scale * LOG2E, tiles,
        L=band.length, STRIDE=band.stride, W=band.window, IS_PREFIX=band.is_prefix, R=H // G, D=D, STAGES=STAGES,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
    if splits > 1:
        sum_splits_kernel[(cdiv(dk.numel(), 1024),)](*parts, dk, dv, dk.numel(), splits, BLOCK=1024)
