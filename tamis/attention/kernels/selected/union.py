"""Selected attention, query tile by query tile: neighbouring tokens walk all blocks that any of them chose.

A row that did not choose a block lets it pass: masking whole rows costs nothing per score. While the union of a tile's
choices is short (short sequences, or neighbours that choose alike) this runs at dense speed, and nothing but the result
is written. A tile whose union is long walks only the forced blocks, which its tokens share, and leaves their other
choices to the other form. This is decided on the device, the host never asks.

Rows of a tile are tokens × heads of the group.
Shapes: B batch, S queries, T = start + S keys, H query heads, G groups, R = H/G heads per group, D head dim,
n slots (n_sel). A kernel that gets None for `start` is compiled without it. In a packed row blocks of all documents are
numbered in order, and the table of tokens has the first one of every document; else block `b` begins at `b·L_SEL`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.banded.queries import described_keys, program_tile
from tamis.attention.kernels.launch import (
    LOG2E,
    MOST_KEYS,
    PreparedKernel,
    block_tiles,
    cdiv,
    copies_tiles,
    launch_settings,
    next_power_of_2,
    padded,
    precision,
    read_start,
    softmax_scale,
    specializes_warps,
    start_argument,
)  # fmt: skip
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import PackedTables
from tamis.attention.spec import FORCED_BLOCKS, NSASpec, Start, latest_start

MOST_TOKENS = 64  # of a tile: a block's tokens are the bits of one word
ROWS_IN_GLUON = 128  # of a tile of `union_on_hopper.py`
WORTHWHILE = 2.5  # longest union that beats the other form, as a multiple of what its tokens chose on average; measured


@dataclass(frozen=True)
class Unions:
    """The blocks that each tile of queries walks, ascending, and which of its tokens chose each."""

    blocks: Tensor  # int32 [B,G,tiles,capacity]: first token of each
    tokens: Tensor  # int64 [B,G,tiles,capacity]: one bit per token of the tile
    counts: Tensor  # int32 [B,G,tiles,2]: how many blocks, and how many of them all rows see whole
    rest: Tensor | None  # int32 [B,S,G,n]: choices left to the other form, then −1; None: there are none


def union_forward(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    ids_BSGn: Tensor,
    spec: NSASpec,
    every_tile: bool = True,
    start: Start = 0,
    packed: PackedTables | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Unions]:
    """Output and natural log-sum-exp over the unions; over all choices, or without those left to the other form."""
    batch, tokens, heads, dim = q_BSHD.shape
    groups = ids_BSGn.shape[2]
    heads_per_group = heads // groups
    keys, parts = block_tiles(spec)
    # A copy also takes what lies behind the last key, so there must be nothing: a cache may be longer than its keys.
    copied = k_BTGD.shape[1] == tokens and copies_tiles(heads_per_group, k_BTGD, v_BTGD)
    settings = launch_settings("union_copied" if copied else "union", q_BSHD, heads_per_group)
    in_gluon = copies_blocks(q_BSHD, k_BTGD, v_BTGD, spec, start)
    settings["ROWS"] = min(ROWS_IN_GLUON if in_gluon else settings["ROWS"], MOST_TOKENS * heads_per_group)
    unions = unite_choices(ids_BSGn, spec, settings["ROWS"] // heads_per_group, every_tile, start, packed)
    out = empty((batch, tokens, heads, dim), q_BSHD.dtype, q_BSHD.device)
    lse = empty((batch, heads, tokens), torch.float32, q_BSHD.device)
    if in_gluon:
        # Here, because not every Triton has Gluon.
        from tamis.attention.kernels.selected.union_on_hopper import attend_on_hopper

        attend_on_hopper(q_BSHD, k_BTGD, v_BTGD, unions, out, lse, softmax_scale(q_BSHD, scale) * LOG2E)
        return out, lse, unions
    _forward_tiles[(unions.blocks.shape[2] * batch * groups,)](
        q_BSHD, *(described_keys(x, keys, copied) for x in (k_BTGD, v_BTGD)),
        unions.blocks, unions.tokens, unions.counts, out, lse, tokens, start_argument(start),
        *unions.blocks.shape[2:], softmax_scale(q_BSHD, scale) * LOG2E,
        *q_BSHD.stride()[:3], *k_BTGD.stride()[:3], *v_BTGD.stride()[:3],
        G=groups, R=heads_per_group, L_SEL=spec.l_sel, SUB=parts, BN=keys, D=dim, BD=padded(dim),
        PRECISION=precision(q_BSHD.dtype), COPIED=copied, **settings,
    )  # fmt: skip
    return out, lse, unions


def copies_blocks(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, spec: NSASpec, start: Start = 0) -> bool:
    """Whether `union_on_hopper.py` has the kernel for these. A cache may be longer than its keys, as above."""
    from_the_first = start_argument(start) is None and k_BTGD.shape[1] == q_BSHD.shape[1]
    heads_per_group = q_BSHD.shape[2] // k_BTGD.shape[2]
    return from_the_first and spec.l_sel == MOST_KEYS and heads_per_group > 1 and specializes_warps(k_BTGD, v_BTGD)


def unite_choices(
    ids_BSGn: Tensor,
    spec: NSASpec,
    tile: int,
    every_tile: bool,
    start: Start = 0,
    packed: PackedTables | None = None,
) -> Unions:
    """Collect the blocks of every tile."""
    batch, tokens, groups, slots = ids_BSGn.shape
    blocks, tiles = spec.selection_blocks(latest_start(start) + tokens), cdiv(tokens, tile)
    if packed:  # of the document in which a tile begins, and no more than one for each token that follows
        blocks = min(packed.blocks, tile + spec.selection_blocks(packed.longest))
    most = blocks if every_tile else min(blocks, max(FORCED_BLOCKS, int(WORTHWHILE * slots)))
    shape = (batch, groups, tiles, most + 2)  # one more shows that there are too many, and one is read ahead
    unions = Unions(
        empty(shape, torch.int32, ids_BSGn.device),
        empty(shape, torch.int64, ids_BSGn.device),
        empty((*shape[:3], 2), torch.int32, ids_BSGn.device),
        None if every_tile else empty(ids_BSGn.shape, torch.int32, ids_BSGn.device),
    )
    padded_tile, padded_slots = next_power_of_2(tile), next_power_of_2(slots)
    _unite_choices[(tiles * batch * groups,)](
        ids_BSGn, unions.blocks, unions.tokens, unions.counts, unions.rest, packed.token if packed else None, tokens,
        start_argument(start), tiles, most,
        *ids_BSGn.stride()[:3], G=groups, N=slots, BS=padded_slots, L_SEL=spec.l_sel, TILE=tile, BT=padded_tile,
        WORTHWHILE=WORTHWHILE, num_warps=1 if padded_tile * padded_slots <= 512 else 4,
    )  # fmt: skip
    return unions


@PreparedKernel
@triton.jit(do_not_specialize=["start"])
def _unite_choices(
    ids, union_blocks, union_tokens, counts, rest, table, tokens, start, tiles, most, i_b, i_s, i_g,
    G: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, L_SEL: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr,
    WORTHWHILE: tl.constexpr,
):  # fmt: skip
    """Take the tile's distinct blocks out one by one, the smallest first. If there are too many, take the first and the
    two newest of the token in its middle. Without `rest` there are never too many."""
    NONE: tl.constexpr = 2147483647
    tile = tl.program_id(0) % tiles
    sequence_group = (tl.program_id(0) // tiles).to(tl.int64)
    sequence, group = sequence_group // G, sequence_group % G
    element = tl.arange(0, BT * BS)
    in_tile, slot = element // BS, element % BS
    token = tile * TILE + in_tile
    exists = (in_tile < TILE) & (token < tokens) & (slot < N)
    ids += sequence * i_b + group * i_g
    choice = tl.load(ids + token.to(tl.int64) * i_s + slot, mask=exists, other=-1)
    if table is None:
        block = tl.where(choice >= 0, choice * L_SEL, -1)
    else:
        first_token = tl.load(table + 4 * token, mask=exists, other=0)
        first_block = tl.load(table + 4 * token + 2, mask=exists, other=0)
        block = tl.where(choice >= 0, first_token + (choice - first_block) * L_SEL, -1)
    token_bit = tl.full((BT * BS,), 1, tl.int64) << in_tile.to(tl.int64)
    row = sequence_group * tiles + tile
    union_blocks += row * (most + 2)
    union_tokens += row * (most + 2)
    first_position = tile * TILE
    if start is not None:
        first_position += read_start(start)
    used = 0
    whole = 0
    next_block = tl.min(tl.where(block >= 0, block, NONE), 0)
    if rest is not None:
        sampled = _sample_of(ids, tile, tokens, i_s, N, BS, TILE)
        if sampled > most:  # nothing to count
            used = most + 1
    while (used <= most) & (next_block < NONE):
        _note_block(union_blocks + used, union_tokens + used, next_block, block, token_bit)
        used += 1
        whole += (next_block + L_SEL <= first_position + 1).to(tl.int32)
        next_block = tl.min(tl.where(block > next_block, block, NONE), 0)
    if rest is not None:
        here = tl.minimum(TILE, tokens - tile * TILE)
        left = tl.zeros((BT * BS,), tl.int32)
        if (used > most) | (used * here > WORTHWHILE * tl.sum((block >= 0).to(tl.int32), 0)):
            used = 0
            whole = 0
            left = (block >= 0).to(tl.int32)
            of_middle = (block >= 0) & (in_tile == here // 2)
            next_block = tl.min(tl.where(of_middle, block, NONE), 0)
            of_middle &= block >= tl.max(tl.where(of_middle, block, -1), 0) - L_SEL
            while next_block < NONE:
                _note_block(union_blocks + used, union_tokens + used, next_block, block, token_bit)
                used += 1
                whole += (next_block + L_SEL <= first_position + 1).to(tl.int32)
                left = tl.where(block == next_block, 0, left)
                next_block = tl.min(tl.where(of_middle & (block > next_block), block, NONE), 0)
        # What is left of a token's choices comes first, in its order; the other places say −1.
        before = tl.reshape(tl.cumsum(tl.reshape(left, (BT, BS)), 1), (BT * BS,))
        kept = tl.reshape(tl.broadcast_to(tl.sum(tl.reshape(left, (BT, BS)), 1)[:, None], (BT, BS)), (BT * BS,))
        place = tl.where(left == 1, before - 1, kept + slot - before)
        rest += ((sequence * tokens + token) * G + group) * N
        tl.store(rest + place, tl.where(left == 1, choice, -1), mask=exists)
    tl.store(counts + row * 2, used)
    tl.store(counts + row * 2 + 1, whole)


@triton.jit
def _note_block(at_block, at_tokens, next_block, block, token_bit):
    """Store a block of a union, and which of the tile's tokens chose it."""
    tl.store(at_block, next_block)
    tl.store(at_tokens, tl.sum(tl.where(block == next_block, token_bit, 0), 0))


@triton.jit
def _sample_of(ids, tile, tokens, i_s, N: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr):
    """How many different blocks four tokens of the tile chose, far apart: no more than the whole tile did."""
    choice = tl.arange(0, 4 * BS)
    in_tile = choice // BS * ((TILE - 1) // 3)
    token = tile * TILE + in_tile
    exists = (in_tile < TILE) & (token < tokens) & (choice % BS < N)
    block = tl.load(ids + token.to(tl.int64) * i_s + choice % BS, mask=exists, other=-1)
    repeated = (block[:, None] == block[None, :]) & (choice[None, :] < choice[:, None])
    first = (tl.max(repeated.to(tl.int32), 1) == 0) & (block >= 0)
    return tl.sum(first.to(tl.int32), 0)


@PreparedKernel
@triton.jit(do_not_specialize=["start"])
def _forward_tiles(
    q, k, v, union_blocks, union_tokens, counts, out, lse, tokens, start, tiles, capacity, scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    G: tl.constexpr, R: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, COPIED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Running softmax over the union of a tile. `scale` includes log2(e)."""
    tile, sequence, group = program_tile(tiles, G)
    sequence, group = sequence.to(tl.int64), group.to(tl.int64)
    sequence_group = sequence * G + group
    used = tl.load(counts + (sequence_group * tiles + tile) * 2)
    whole = tl.load(counts + (sequence_group * tiles + tile) * 2 + 1)
    union_blocks += (sequence_group * tiles + tile) * capacity
    union_tokens += (sequence_group * tiles + tile) * capacity
    row = tl.arange(0, ROWS)
    in_tile = (row // R).to(tl.int64)
    token = tile * (ROWS // R) + row // R
    live = (row < (ROWS // R) * R) & (token < tokens)
    token64 = token.to(tl.int64)
    head = group * R + row % R
    q_tile = load_at(q, sequence * q_b + token64 * q_s + head * q_h, live, D, BD)
    if not COPIED:
        k += sequence * k_b + group * k_g
        v += sequence * v_b + group * v_g
    keys, position = tokens, token
    if start is not None:
        start = read_start(start)
        keys, position = keys + start, position + start

    column = tl.arange(0, BN)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BD), tl.float32)
    next_block = tl.load(union_blocks)  # read one step ahead, so that no load of keys waits for it
    next_tokens = tl.load(union_tokens)
    for step in range(used * SUB):
        begin = next_block
        chosen = ((next_tokens >> in_tile) & 1) == 1
        next_block = tl.load(union_blocks + (step + 1) // SUB)
        next_tokens = tl.load(union_tokens + (step + 1) // SUB)
        in_block = (step % SUB) * BN + column
        key = begin + in_block
        key_live = key < keys
        if L_SEL % BN != 0:
            key_live = key_live & (in_block < L_SEL)
        if COPIED:
            first = begin + (step % SUB) * BN
            k_tile = tl.reshape(k.load([sequence.to(tl.int32), first, group.to(tl.int32), 0]), [BN, BD])
            v_tile = tl.reshape(v.load([sequence.to(tl.int32), first, group.to(tl.int32), 0]), [BN, BD])
        else:
            k_tile = load_at(k, key.to(tl.int64) * k_s, key_live, D, BD)
            v_tile = load_at(v, key.to(tl.int64) * v_s, key_live, D, BD)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if (step >= whole * SUB) | (L_SEL % BN != 0):
            s = tl.where(key_live[None, :] & (key[None, :] <= position[:, None]), s, -float("inf"))
        block_top = tl.max(s, 1) * scale
        chosen = chosen & (block_top > -float("inf"))
        new_top = tl.where(chosen, tl.maximum(top, block_top), top)
        # exp2(−inf) = 0: rows that did not choose the block, or see none of it, let it pass.
        p = tl.exp2(s * scale - tl.where(chosen, new_top, float("inf"))[:, None])
        decay = tl.exp2(top - tl.where(new_top == -float("inf"), 0.0, new_top))
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_at(out, ((sequence * tokens + token64) * (G * R) + head) * D, acc, live, D, BD)
    natural = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + (sequence * (G * R) + head) * tokens + token64, natural, mask=live)


@triton.jit
def load_at(base, offset, live, D: tl.constexpr, BD: tl.constexpr, ONCE: tl.constexpr = False):
    """Load rows of D elements at `offset`; zeros where not live and in D's padding. Read ONCE, they leave L2 first."""
    column = tl.arange(0, BD)
    mask = live[:, None] if D == BD else live[:, None] & (column < D)[None, :]
    policy: tl.constexpr = "evict_first" if ONCE else ""
    return tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0, eviction_policy=policy)


@triton.jit
def store_at(base, offset, value, live, D: tl.constexpr, BD: tl.constexpr, ONCE: tl.constexpr = False):
    """Store rows of D elements at `offset`; rows that are read ONCE, and much later, leave L2 first."""
    column = tl.arange(0, BD)
    mask = live[:, None] if D == BD else live[:, None] & (column < D)[None, :]
    modifier: tl.constexpr = ".cs" if ONCE else ""
    target = base + offset[:, None] + column[None, :]
    tl.store(target, value.to(base.dtype.element_ty), mask=mask, cache_modifier=modifier)
