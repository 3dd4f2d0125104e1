"""Triton: dk and dv of the compressed and the window branch. Programs hold keys and walk the rows that see them.

There are two kernels. One reads rows through pointers and takes any group. Where a tile of rows is whole tokens, the
tensor memory accelerator copies the rows for the other one. It needs no addresses, so its scores are [keys, rows]: p
and ds go from registers into the products, and one loop masks tiles of rows under a branch.

With few keys and many rows (the compressed branch) the rows are split over programs, and the partial sums are added in
a fixed order. Programs that run together walk the same copied rows where that pays. Shapes as in `queries.py`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.attention.kernels.banded.queries import Band, Rows, load_keys, load_rows, rows_from, visible
from tamis.attention.kernels.banded.statistics import gather_statistics
from tamis.attention.kernels.launch import (
    LOG2E,
    PreparedKernel,
    cdiv,
    copies_tiles,
    launch_by_triton,
    padded,
    precision,
    specializes_warps,
    tile_for,
    unit_last_stride,
)
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import KEYS_OF_TILE

PROGRAMS_WANTED = 1024  # the rows of a tile of keys are split until there are about so many programs
MOST_SPLITS = 16  # each split holds float32 copies of dk and dv until they are summed
LEAST_COPY = 16  # bytes of a row that the accelerator copies
# From so many keys on, copied: twice the programs, which walk the same rows together.
MANY_KEYS = 1024
TILE_OF_KEYS = tl.constexpr(KEYS_OF_TILE)  # as tables list them; a kernel's tile is a part of one


@triton.jit
def _key_tile(tiles_of_keys, tile, N, BN: tl.constexpr):
    """First key of a tile, and the one after the last that it may hold: those of one document, if tiles are listed."""
    first, end = tile * BN, N
    if tiles_of_keys is not None:
        at = tiles_of_keys + tile // (TILE_OF_KEYS // BN) * 2
        first = tl.minimum(tl.load(at) + tile % (TILE_OF_KEYS // BN) * BN, N)
        end = tl.load(at + 1)
    return first, end


@triton.jit
def _document_ends(table, first, last, W: tl.constexpr):
    """Where the documents of two keys of a packed row end; meaningless without a table."""
    first_end, last_end = first, last
    if table is not None:
        if W > 0:
            first_end, last_end = tl.load(table + 4 * first + 1), tl.load(table + 4 * last + 1)
        else:
            first_end = tl.load(table + 2 * first + 1)
            last_end = first_end
    return first_end, last_end


@triton.jit
def _mask_rows(
    p, table, token, key, first, N, t_begin, first_end, last_end, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr
):
    """0 in place of the tokens that do not see a key, up to the end of the last document; laid out as in p."""
    if table is None:
        p = tl.where(visible(token, key, L, STRIDE, W), p, 0.0)
    elif W == 0:
        shift = t_begin - (first * STRIDE + L - 1)  # of positions in the row against those in the document
        p = tl.where(visible(token - shift, key, L, STRIDE, W), p, 0.0)
    else:
        p = tl.where(visible(token, key, L, STRIDE, W), p, 0.0)
        if first_end != last_end:  # keys look up their documents only where a tile has several: it costs registers
            p = tl.where(token < tl.load(table + 4 * tl.minimum(key, N - 1) + 1), p, 0.0)
    return p


@triton.jit
def _row_tiles(
    table,
    first,
    last,
    first_end,
    last_end,
    S,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
):
    """First token that sees keys first…last; tiles of rows from there, and which of them see all keys."""
    t_begin, t_end = first * STRIDE + L - 1, S
    t_whole, t_whole_end = last * STRIDE + L - 1, S
    if W > 0:
        t_end = tl.minimum(last + W, S)
        t_whole_end = tl.minimum(first + W, S)
    if table is not None:
        t_end, t_whole_end = tl.minimum(t_end, last_end), tl.minimum(t_whole_end, first_end)
        if W == 0:
            t_begin, t_whole = tl.load(table + 2 * first), tl.load(table + 2 * last)
    tiles = tl.cdiv((t_end - t_begin) * R, BM)
    whole_first = tl.minimum(tl.cdiv((t_whole - t_begin) * R, BM), tiles)
    whole_end = tl.maximum((t_whole_end - t_begin) * R // BM, whole_first)
    return t_begin, tiles, whole_first, whole_end


@triton.jit
def _split(tiles, split, SPLITS):
    """A split's first tile of rows, and the one after its last."""
    return tiles * split // SPLITS, tiles * (split + 1) // SPLITS


@triton.jit
def _shared_split(
    tiles, split, SPLITS, first, S, L: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, BM: tl.constexpr
):
    """As `_split`, where a split takes the same rows for every tile of keys, as far as they see key `first`."""
    begin, end = _split(tl.cdiv((S - L + 1) * R, BM), split, SPLITS)
    before = first * STRIDE * R // BM
    begin = tl.minimum(tl.maximum(begin - before, 0), tiles)
    end = tl.minimum(tl.maximum(end - before, 0), tiles)
    return begin, tl.where(split == SPLITS - 1, tiles, end)


@triton.jit
def _step(
    k, v, q, dout, lse, gate, delta, table, first, S, rows_end, key, first_key, N, t_begin, first_end,
    last_end, dk, dv, scale,
    stride_qs, stride_qh, stride_os, stride_oh,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one tile of rows, those of tokens before `rows_end`. Rows that see all keys (not MASKED) all exist."""
    t0, away, r, alive = rows_from(first, rows_end, R, BM)
    q_tile = load_rows(q, t0, away, r, alive, stride_qs, stride_qh, D, DP, MASKED)
    dout_tile = load_rows(dout, t0, away, r, alive, stride_os, stride_oh, D, DP, MASKED)
    scalar = r * S + away
    if MASKED:
        lse2 = tl.load(lse + t0 + scalar, mask=alive, other=float("inf")) * 1.4426950408889634  # no row, no weight
        delta_row = tl.load(delta + t0 + scalar, mask=alive, other=0.0)
        gate_row = tl.load(gate + t0 + scalar, mask=alive, other=0.0)
    else:
        lse2 = tl.load(lse + t0 + scalar) * 1.4426950408889634
        delta_row = tl.load(delta + t0 + scalar)
        gate_row = tl.load(gate + t0 + scalar)
    s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(s * scale - lse2[:, None])
    if MASKED:
        p = _mask_rows(
            p, table, t0 + away[:, None], key[None, :], first_key, N, t_begin, first_end, last_end, L, STRIDE, W
        )  # fmt: skip
    dp = tl.dot(dout_tile, tl.trans(v), input_precision=PRECISION)
    # Gradients are summed transposed, so that p and ds are right-hand sides and reach shared memory as they are.
    dv = tl.dot(tl.trans(dout_tile), (p * gate_row[:, None]).to(dout_tile.dtype), dv, input_precision=PRECISION)
    ds = p * (dp * gate_row[:, None] - delta_row[:, None])
    dk = tl.dot(tl.trans(q_tile), ds.to(q_tile.dtype), dk, input_precision=PRECISION)
    return dk, dv


@PreparedKernel
@triton.jit(do_not_specialize=["B", "S", "N", "G", "SPLITS"])
def _dkv_kernel(
    q, k, v, lse, dout, gate, delta, table, tiles_of_keys, dk_out, dv_out,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_ob, stride_os, stride_oh, B, S, N, G, SPLITS, softmax_scale, scale,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys from one split of the rows that see it; outputs are [SPLITS,B,N,G,D]."""
    bg = tl.program_id(0) % (B * G)
    split = tl.program_id(0) // (B * G) % SPLITS
    tile = tl.program_id(0) // (B * G) // SPLITS  # the first keys are seen by most rows: longest first
    b, g = (bg // G).to(tl.int64), bg % G
    first, keys = _key_tile(tiles_of_keys, tile, N, BN)
    if (tiles_of_keys is not None) and first >= keys:
        return
    last = tl.minimum(first + BN, keys) - 1
    k += b * stride_kb + g * stride_kg
    v += b * stride_vb + g * stride_vg
    k_tile = load_keys(k, b, g, first, keys, stride_kn, D, DP, BN, False)
    v_tile = load_keys(v, b, g, first, keys, stride_vn, D, DP, BN, False)
    q += b * stride_qb + g * R * stride_qh
    dout += b * stride_ob + g * R * stride_oh
    lse += (b * G + g) * R * S
    delta += (b * G + g) * R * S
    gate += (b * G + g) * R * S

    first_end, last_end = _document_ends(table, first, last, W)
    rows_end = S if table is None else last_end
    t_begin, tiles, whole_first, whole_end = _row_tiles(
        table, first, last, first_end, last_end, S, L, STRIDE, W, R, BM
    )  # fmt: skip
    mine, mine_end = _split(tiles, split, SPLITS)
    key = first + tl.arange(0, BN)
    dk = tl.zeros([DP, BN], tl.float32)
    dv = tl.zeros([DP, BN], tl.float32)
    for j in range(tl.maximum(mine, whole_first), tl.minimum(mine_end, whole_end)):
        dk, dv = _step(
            k_tile, v_tile, q, dout, lse, gate, delta, table, t_begin * R + j * BM, S, rows_end, key, first, N, t_begin,
            first_end, last_end, dk, dv, scale,
            stride_qs, stride_qh, stride_os, stride_oh,
            L, STRIDE, W, R, D, DP, BM, PRECISION, False,
        )  # fmt: skip
    left = tl.maximum(tl.minimum(mine_end, whole_first) - mine, 0)
    right_first = tl.maximum(mine, whole_end)
    for e in range(left + tl.maximum(mine_end - right_first, 0)):
        j = tl.where(e < left, mine + e, right_first + e - left)
        dk, dv = _step(
            k_tile, v_tile, q, dout, lse, gate, delta, table, t_begin * R + j * BM, S, rows_end, key, first, N, t_begin,
            first_end, last_end, dk, dv, scale,
            stride_qs, stride_qh, stride_os, stride_oh,
            L, STRIDE, W, R, D, DP, BM, PRECISION, True,
        )  # fmt: skip

    column = tl.arange(0, DP)
    at = (((split * B + b) * N + key) * G + g)[:, None] * D + column[None, :]
    mask = (key < keys)[:, None] & (column < D)[None, :]
    dk *= softmax_scale
    tl.store(dk_out + at, tl.trans(dk).to(dk_out.dtype.element_ty), mask=mask)
    tl.store(dv_out + at, tl.trans(dv).to(dv_out.dtype.element_ty), mask=mask)


@triton.jit
def _copied_statistics(statistics, at, head, BM: tl.constexpr):
    """A tile's log-sum-exp, delta and gate by one copy; it takes four planes, the last of them out of bounds."""
    planes = tl.reshape(statistics.load([0, at, head]), [4, BM])
    even, odd = tl.split(tl.reshape(tl.trans(planes), [BM, 2, 2]))
    lse2, gate = tl.split(even)
    delta, _ = tl.split(odd)
    return lse2, delta, gate


@triton.jit(do_not_specialize=["B", "S", "N", "G", "SPLITS", "key_tiles"])
def _dkv_copied_kernel(
    q, k, v, dout, statistics, table, tiles_of_keys, dk_out, dv_out,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, B, S, N, G, SPLITS, softmax_scale, scale,
    key_tiles,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_dkv_kernel`; q and dout are descriptors of [B·S,H,D], statistics of [3,B·S,H]: lse (base 2), delta, gate.

    delta comes without its gate: weights are gated once, for dv and for ds.

    With a window, and without one if TOGETHER, programs that run at once walk the same rows at the same time and read
    them from the L2 cache.
    """
    TOKENS: tl.constexpr = BM // R
    if W > 0:
        bg, rest = tl.program_id(0) // (key_tiles * SPLITS), tl.program_id(0) % (key_tiles * SPLITS)
    else:
        bg, rest = tl.program_id(0) % (B * G), tl.program_id(0) // (B * G)
    if TOGETHER:
        split, tile = rest // key_tiles, rest % key_tiles
    else:
        split, tile = rest % SPLITS, rest // SPLITS  # the first keys are seen by most rows: longest first
    b, g = bg // G, bg % G
    first, keys = _key_tile(tiles_of_keys, tile, N, BN)
    last = tl.maximum(tl.minimum(first + BN, keys) - 1, 0)
    k += b.to(tl.int64) * stride_kb + g * stride_kg
    v += b.to(tl.int64) * stride_vb + g * stride_vg
    k_tile = load_keys(k, b, g, first, keys, stride_kn, D, DP, BN, False)
    v_tile = load_keys(v, b, g, first, keys, stride_vn, D, DP, BN, False)

    first_end, last_end = _document_ends(table, first, last, W)
    rows_end = S if table is None else last_end
    t_begin, tiles, whole_first, whole_end = _row_tiles(
        table, first, last, first_end, last_end, S, L, STRIDE, W, R, BM
    )  # fmt: skip
    mine, mine_end = _split(tiles, split, SPLITS)
    if TOGETHER:
        mine, mine_end = _shared_split(tiles, split, SPLITS, first, S, L, STRIDE, R, BM)
    count, rotation = mine_end - mine, 0
    if tiles_of_keys is not None:  # no `return` for tiles without keys: with it, other numbers would spill
        count = tl.where(first < keys, count, 0)
    if W > 0:  # start so that all programs that see a tile of rows take it in the same step
        rotation = count - (t_begin * R // BM + mine) % tl.maximum(count, 1)
    key = first + tl.arange(0, BN)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        j = mine + step
        if W > 0:
            j = mine + tl.where(step + rotation >= count, step + rotation - count, step + rotation)
        t0 = t_begin + j * TOKENS
        q_tile = tl.reshape(q.load([b * S + t0, g * R, 0]), [BM, DP])
        dout_tile = tl.reshape(dout.load([b * S + t0, g * R, 0]), [BM, DP])
        lse2, delta_row, gate_row = _copied_statistics(statistics, b * S + t0, g * R, BM)
        if step < count:  # always true: see the top of `queries.py`
            s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)  # under way while p is computed
            p = tl.exp2(s * scale - lse2[None, :]) * gate_row[None, :]
            if (j < whole_first) | (j >= whole_end):
                token = t0 + tl.arange(0, BM)[None, :] // R
                if table is None:
                    p = tl.where(visible(token, key[:, None], L, STRIDE, W) & (token < S), p, 0.0)
                else:
                    p = tl.where(token < rows_end, p, 0.0)
                    p = _mask_rows(
                        p, table, token, key[:, None], first, N, t_begin, first_end, last_end, L, STRIDE, W
                    )  # fmt: skip
            dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)
            ds = p * (dp - delta_row[None, :])
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)

    column = tl.arange(0, DP)
    at = (((split * B + b).to(tl.int64) * N + key) * G + g)[:, None] * D + column[None, :]
    mask = (key < keys)[:, None] & (column < D)[None, :]
    dk *= softmax_scale
    tl.store(dk_out + at, dk.to(dk_out.dtype.element_ty), mask=mask)
    tl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=mask)


@PreparedKernel
@triton.jit(do_not_specialize=["size", "SPLITS"])
def sum_splits_kernel(dk_parts, dv_parts, dk, dv, size, SPLITS, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    dk_sum = tl.zeros([BLOCK], tl.float32)
    dv_sum = tl.zeros([BLOCK], tl.float32)
    for _ in range(SPLITS):  # always in this order, so that the bits repeat
        dk_sum += tl.load(dk_parts + index, mask=mask, other=0.0)
        dv_sum += tl.load(dv_parts + index, mask=mask, other=0.0)
        dk_parts += size
        dv_parts += size
    tl.store(dk + index, dk_sum.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + index, dv_sum.to(dv.dtype.element_ty), mask=mask)


def key_gradients(q: Tensor, band: Band, rows: Rows, dout: Tensor) -> tuple[Tensor, Tensor]:
    """(dk, dv) of one branch; `dout` is the mixed output's gradient, not yet times this branch's gate."""
    q, dout, k, v = unit_last_stride(q), unit_last_stride(dout), band.k, band.v
    B, S, H, D = q.shape
    N, G = k.shape[1:3]
    R, scale = H // G, band.scale
    dk, dv = (empty((B, N, G, D), k.dtype, k.device) for _ in range(2))
    if N == 0:
        return dk, dv
    if copies_rows_of_heads(q, dout, rows):
        from tamis.attention.kernels.banded.keys_on_hopper import write_key_gradients  # not every Triton has Gluon

        write_key_gradients(q, band, rows, dout, dk, dv)
        return dk, dv
    assert not band.is_prefix, "only the kernel above ends with a prefix"
    copied = copies_rows(q, dout, R)
    many = copied and not band.window and N >= MANY_KEYS and band.rows_of_key is None
    tile = tile_for("dkv", q, R, copied)
    key_tiles = cdiv(N, tile.keys)
    programs = PROGRAMS_WANTED * (2 if many else 1)
    splits = 1 if band.window else max(1, min(MOST_SPLITS, programs // (key_tiles * B * G)))
    if band.tiles_of_keys is not None:  # more than there are keys for, and those without keys end at once
        key_tiles = band.tiles_of_keys.numel() // 2 * (TILE_OF_KEYS.value // tile.keys)
    parts = [empty((splits, *dk.shape), torch.float32, k.device) for _ in range(2)] if splits > 1 else [dk, dv]
    grid = (key_tiles * B * G * splits,)
    numbers = (B, S, N, G, splits, scale, scale * LOG2E)
    constants: dict[str, int | str] = {"L": band.length, "STRIDE": band.stride, "W": band.window, "R": R, "D": D}
    constants |= {"DP": padded(D), "BM": tile.rows, "BN": tile.keys, "PRECISION": precision(q.dtype), **tile.options}
    if copied:
        statistics = gather_statistics(rows.lse, rows.delta, rows.gate.transpose(1, 2), gated=False).view(3, B * S, H)
        described = TensorDescriptor(statistics, [3, B * S, H], [B * S * H, H, 1], [4, tile.rows // R, R])
        walked = [_described_rows(x, tile.rows // R, R) for x in (q, dout)]
        launch_by_triton(
            _dkv_copied_kernel, grid, walked[0], k, v, walked[1], described, band.rows_of_key, band.tiles_of_keys,
            *parts, *band.strides, *numbers, key_tiles, TOGETHER=many, STAGES=tile.stages, **constants,
        )  # fmt: skip
    else:
        _dkv_kernel[grid](
            q, k, v, rows.lse, dout, rows.gate, rows.delta, band.rows_of_key, band.tiles_of_keys, *parts,
            *q.stride()[:3], *band.strides, *dout.stride()[:3], *numbers, **constants,
        )  # fmt: skip
    if splits > 1:
        sum_splits_kernel[(cdiv(dk.numel(), 1024),)](*parts, dk, dv, dk.numel(), splits, BLOCK=1024)
    return dk, dv


def copies_rows(q: Tensor, dout: Tensor, heads: int) -> bool:
    """Whether tiles of rows can be copied: they are whole tokens, and all sequences are one distance apart."""
    if not copies_tiles(heads, q, dout):
        return False
    joined = all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (q, dout))
    return joined and heads * 4 % LEAST_COPY == 0 and tile_for("dkv", q, heads, copied=True).rows % heads == 0


def copies_rows_of_heads(q: Tensor, dout: Tensor, rows: Rows) -> bool:
    """Whether `keys_on_hopper.py` has the kernel for these."""
    return specializes_warps(q, dout) and all(x.is_contiguous() and x.data_ptr() % LEAST_COPY == 0 for x in rows)


def _described_rows(x: Tensor, tokens: int, heads: int) -> TensorDescriptor:
    B, S, H, D = x.shape
    return TensorDescriptor(x, [B * S, H, D], [*x.stride()[1:]], [tokens, heads, padded(D)])
