"""Gluon: forward of the compressed and the window branch on Hopper at head dim 64, where `copies_heads` holds.

One warp of a program does nothing but copy tiles into shared memory, by the tensor memory accelerator. The others
multiply, four warps for each tile of 64 rows. Every slot of a ring of tiles has two barriers: one is passed when the
slot is full, the other when it is empty. So copies never wait for products, and no register holds an address.

Rows are 64 tokens of one head. `queries.py` has the same in Triton for other shapes and GPUs, and defines which keys a
token sees. Packed rows read the same tables.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tamis.attention.kernels.banded.queries import Band
from tamis.attention.kernels.hopper.barriers import barriers_of_ring
from tamis.attention.kernels.hopper.boxes import seen_by_token
from tamis.attention.kernels.hopper.descriptors import described_heads
from tamis.attention.kernels.hopper.softmax import add_to_sums, layout_of_sums, max_of_rows, total_of_sums
from tamis.attention.kernels.launch import LOG2E, PreparedKernel, cdiv, multiprocessors

HEADS = 2  # of a group, that share the keys which a program copies
STAGES = 4
PROGRAMS = 2  # on a multiprocessor; in the compressed branch each takes one tile of rows after the other


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
        begin, _ = seen_by_token(table, t0, L, STRIDE, W)
        _, end = seen_by_token(table, gl.minimum(t0 + 63, S - 1), L, STRIDE, W)
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
        seen_begin, seen_end = seen_by_token(table, gl.minimum(token, S - 1), L, STRIDE, W)
        begin, whole_end = seen_by_token(table, t0, L, STRIDE, W)
        whole_begin, end = seen_by_token(table, gl.minimum(t0 + 63, S - 1), L, STRIDE, W)
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
    full, empty = barriers_of_ring(STAGES, HEADS)
    held_full, held_empty = barriers_of_ring(2, HEADS)
    fence_async_shared()
    shared = (held, ring, full, empty, held_full, held_empty)
    gl.warp_specialize([
        (_attend, (out, lse, scale, table, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS, 0)),
        (_attend, (out, lse, scale, table, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS, 1)),
        (_copy_queries_and_keys, (q, k, v, table, shared, works, S, G, L, STRIDE, W, R, D, STAGES, HEADS)),
    ], [4, 1], [104, 24])  # fmt: skip


def forward_on_hopper(q: Tensor, band: Band, out: Tensor, lse: Tensor) -> None:
    """Write what `banded_forward` returns for queries from position 0 on."""
    B, S, H, D = q.shape
    G = band.k.shape[2]
    works = B * cdiv(S, 64) * (H // HEADS)
    # The window's programs should make room for what runs next to them: each takes one tile.
    programs = works if band.window else min(works, PROGRAMS * multiprocessors(q.device))
    forward_by_head[(programs,)](
        out, lse, band.documents, *(described_heads(x) for x in (q, band.k, band.v)), works, S, G, band.scale * LOG2E,
        L=band.length, STRIDE=band.stride, W=band.window, R=H // G, D=D, STAGES=STAGES, HEADS=HEADS,
        num_warps=4, maxnreg=80,
    )  # fmt: skip
