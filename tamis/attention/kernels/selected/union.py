"""Selected attention, query tile by query tile: neighbouring tokens walk all blocks that any of them chose.

A row that did not choose a block lets it pass: masking whole rows costs nothing per score. While the union of a tile's
choices is short (short sequences, or neighbours that choose alike) this runs at dense speed, and nothing but the result
is written. A tile whose union is long walks only the forced blocks, which its tokens share, and leaves their other
choices to the other form. This is decided on the device, the host never asks.

Rows of a tile are tokens × heads of the group.
Shapes: B batch, S queries, T = start + S keys, H query heads, G groups, R = H/G heads per group, D head dim,
n slots (n_sel). A kernel that gets None for `start` is compiled without it. In a packed row blocks of all documents are
numbered in order, and a table has the first token of each; else block `b` begins at `b·L_SEL`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.kernels.banded.queries import described_keys, program_tile
from tamis.attention.kernels.gates import Mixture, mix, mixture_arguments
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
    takes_boxes,
)  # fmt: skip
from tamis.attention.kernels.tape import empty
from tamis.attention.packing import PackedTables
from tamis.attention.spec import FORCED_BLOCKS, NSASpec, Start, latest_start

AT_ONCE = tl.constexpr(32)  # blocks that are collected together: bits of a word
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
    mixture: Mixture | None = None,
) -> tuple[Tensor, Tensor, Unions]:
    """Output and natural log-sum-exp over the unions; over all choices, or without those left to the other form.

    A `mixture` is computed along with them: of unions of every tile, whose output is the branch's.
    """
    batch, tokens, heads, dim = q_BSHD.shape
    groups = ids_BSGn.shape[2]
    heads_per_group = heads // groups
    keys, parts = block_tiles(spec)
    # A copy also takes what lies behind the last key, so there must be nothing: a cache may be longer than its keys.
    copied = k_BTGD.shape[1] == tokens and copies_tiles(heads_per_group, k_BTGD, v_BTGD)
    settings = launch_settings("union_copied" if copied else "union", q_BSHD, heads_per_group)
    of_boxes = tokens_of_boxes(q_BSHD, k_BTGD, v_BTGD, spec, start)
    in_gluon = not of_boxes and copies_blocks(q_BSHD, k_BTGD, v_BTGD, spec, start)
    settings["ROWS"] = min(ROWS_IN_GLUON if in_gluon else settings["ROWS"], MOST_TOKENS * heads_per_group)
    tile = of_boxes or settings["ROWS"] // heads_per_group
    unions = unite_choices(ids_BSGn, spec, tile, every_tile, start, packed)
    out = empty((batch, tokens, heads, dim), q_BSHD.dtype, q_BSHD.device)
    lse = empty((batch, heads, tokens), torch.float32, q_BSHD.device)
    scale = softmax_scale(q_BSHD, scale) * LOG2E
    # Imported here, because not every Triton has Gluon.
    if in_gluon:
        from tamis.attention.kernels.selected.union_on_hopper import attend_on_hopper

        attend_on_hopper(q_BSHD, k_BTGD, v_BTGD, unions, out, lse, mixture_arguments(mixture), scale)
        return out, lse, unions
    if of_boxes:
        from tamis.attention.kernels.hopper.boxes import attend_list

        attend_list(q_BSHD, k_BTGD, v_BTGD, out, lse, scale, unions.blocks, unions.tokens, unions.counts)
    else:
        _forward_tiles[(unions.blocks.shape[2] * batch * groups,)](
            q_BSHD, *(described_keys(x, keys, copied) for x in (k_BTGD, v_BTGD)),
            unions.blocks, unions.tokens, unions.counts, out, lse, tokens, start_argument(start),
            *unions.blocks.shape[2:], scale, *q_BSHD.stride()[:3], *k_BTGD.stride()[:3], *v_BTGD.stride()[:3],
            G=groups, R=heads_per_group, L_SEL=spec.l_sel, SUB=parts, BN=keys, D=dim, BD=padded(dim),
            PRECISION=precision(q_BSHD.dtype), COPIED=copied, STAGES=settings["num_stages"] if copied else None,
            **settings,
        )  # fmt: skip
    if mixture is not None:
        mix(mixture, out)  # Triton's kernel lacks the registers, and of boxes only the window mixes
    return out, lse, unions


def copies_blocks(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, spec: NSASpec, start: Start = 0) -> bool:
    """Whether `union_on_hopper.py` has the kernel for these."""
    heads_per_group = q_BSHD.shape[2] // k_BTGD.shape[2]
    walks = _walks_whole_blocks(q_BSHD, k_BTGD, spec, start) and heads_per_group > 1
    return walks and specializes_warps(k_BTGD, v_BTGD)


def tokens_of_boxes(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, spec: NSASpec, start: Start = 0) -> int:
    """Tokens of a tile of `hopper/boxes.py`; 0 if it has no kernel for these."""
    walks = _walks_whole_blocks(q_BSHD, k_BTGD, spec, start)
    if not (walks and takes_boxes(q_BSHD, k_BTGD, v_BTGD)):
        return 0
    from tamis.attention.kernels.hopper.boxes import Boxes  # here, because not every Triton has Gluon

    tokens = Boxes.of(q_BSHD.shape[2] // k_BTGD.shape[2]).tokens
    return tokens if tokens <= MOST_TOKENS else 0


def tokens_of_tile(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, spec: NSASpec) -> int:
    """Tokens of a tile on Hopper; where neither kernel in Gluon is taken, those of the one for head dim 64."""
    usual = min(ROWS_IN_GLUON // (q_BSHD.shape[2] // k_BTGD.shape[2]), MOST_TOKENS)
    return tokens_of_boxes(q_BSHD, k_BTGD, v_BTGD, spec) or usual


def _walks_whole_blocks(q_BSHD: Tensor, k_BTGD: Tensor, spec: NSASpec, start: Start) -> bool:
    """Whether blocks are tiles of the kernels in Gluon. A cache may be longer than its keys, as above."""
    from_the_first = start_argument(start) is None and k_BTGD.shape[1] == q_BSHD.shape[1]
    return from_the_first and spec.l_sel == MOST_KEYS


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
        ids_BSGn, unions.blocks, unions.tokens, unions.counts, unions.rest, packed.block if packed else None, tokens,
        start_argument(start), tiles, most,
        *ids_BSGn.stride()[:3], G=groups, N=slots, BS=padded_slots, L_SEL=spec.l_sel, TILE=tile, BT=padded_tile,
        WORTHWHILE=WORTHWHILE, num_warps=1 if padded_tile * padded_slots <= 512 else 4,
    )  # fmt: skip
    return unions


@PreparedKernel
@triton.jit(do_not_specialize=["start"])
def _unite_choices(
    ids, union_blocks, union_tokens, counts, rest, bounds, tokens, start, tiles, most, i_b, i_s, i_g,
    G: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, L_SEL: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr,
    WORTHWHILE: tl.constexpr,
):  # fmt: skip
    """Collect the tile's distinct blocks, ascending, AT_ONCE numbers at a time. If there are too many, take the first
    and the two newest of the token in its middle. Without `rest` there are never too many."""
    NONE: tl.constexpr = 2147483647
    tile = tl.program_id(0) % tiles
    sequence_group = (tl.program_id(0) // tiles).to(tl.int64)
    sequence, group = sequence_group // G, sequence_group % G
    in_tile, slot = tl.arange(0, BT), tl.arange(0, BS)[None, :]
    token = (tile * TILE + in_tile)[:, None]
    exists = (in_tile < TILE)[:, None] & (token < tokens) & (slot < N)
    choice = tl.load(ids + sequence * i_b + group * i_g + token.to(tl.int64) * i_s + slot, mask=exists, other=-1)
    row = sequence_group * tiles + tile
    union_blocks += row * (most + 2)
    union_tokens += row * (most + 2)
    seen_whole = tile * TILE + 1  # what ends before is seen whole by every token of the tile
    if start is not None:
        seen_whole += read_start(start)
    used = 0
    whole = 0
    first = _smallest(choice, 0)
    while (used <= most) & (first < NONE):
        block = first + tl.arange(0, AT_ONCE)
        words = _tokens_of_blocks(choice, first, BT)
        at = used + tl.cumsum((words != 0).to(tl.int32), 0) - 1
        begin = _first_tokens(block, bounds, words != 0, L_SEL)
        kept = (words != 0) & (at <= most)
        tl.store(union_blocks + at, begin, mask=kept)
        tl.store(union_tokens + at, words, mask=kept)
        whole += tl.sum((kept & (begin + L_SEL <= seen_whole)).to(tl.int32), 0)
        used += tl.sum((words != 0).to(tl.int32), 0)
        first = _smallest(choice, first + AT_ONCE)
    if rest is not None:
        here = tl.minimum(TILE, tokens - tile * TILE)
        chosen = choice >= 0
        left = tl.zeros((BT, BS), tl.int32)
        if (used > most) | (used * here > WORTHWHILE * tl.sum(tl.sum(chosen.to(tl.int32), 1), 0)):
            used = 0
            whole = 0
            left = chosen.to(tl.int32)
            of_middle = tl.where((in_tile == here // 2)[:, None], choice, -1)
            newest = tl.max(tl.max(of_middle, 1), 0)
            block = _smallest(of_middle, 0)
            while block < NONE:
                begin = _first_tokens(block, bounds, True, L_SEL)
                chose = tl.max((choice == block).to(tl.int64), 1)
                tl.store(union_blocks + used, begin)
                tl.store(union_tokens + used, tl.sum(chose << in_tile.to(tl.int64), 0))
                used += 1
                whole += (begin + L_SEL <= seen_whole).to(tl.int32)
                left = tl.where(choice == block, 0, left)
                block = _smallest(of_middle, tl.maximum(block + 1, newest - 1))
        # What is left of a token's choices comes first, in its order; the other places are −1.
        before = tl.cumsum(left, 1)
        place = tl.where(left == 1, before - 1, tl.sum(left, 1)[:, None] + slot - before)
        rest += ((sequence * tokens + token) * G + group) * N
        tl.store(rest + place, tl.where(left == 1, choice, -1), mask=exists)
    tl.store(counts + row * 2, used)
    tl.store(counts + row * 2 + 1, whole)


@triton.jit
def _smallest(choice, least):
    """The smallest block that is chosen, of those from `least` on."""
    return tl.min(tl.min(tl.where(choice >= least, choice, 2147483647), 1), 0)


@triton.jit
def _first_tokens(block, bounds, exists, L_SEL: tl.constexpr):
    """Where blocks begin."""
    begin = block * L_SEL
    if bounds is not None:
        begin = tl.load(bounds + 2 * block, mask=exists, other=0)
    return begin


@triton.jit
def _tokens_of_blocks(choice, first, BT: tl.constexpr):
    """For AT_ONCE blocks from `first` on, which of the tile's tokens chose each, as the bits of a word."""
    number = choice - first
    chosen = (number >= 0) & (number < AT_ONCE)
    blocks_of_token = tl.sum(tl.where(chosen, 1 << tl.where(chosen, number, 0), 0), 1)  # bits; no token has one twice
    chose = (blocks_of_token[:, None] >> tl.arange(0, AT_ONCE)[None, :]) & 1
    token = tl.arange(0, BT)[:, None]
    if BT <= 32:
        words = tl.sum(chose << token, 0).to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        words = tl.sum(chose.to(tl.int64) << token.to(tl.int64), 0)
    return words


@PreparedKernel
@triton.jit(do_not_specialize=["start"])
def _forward_tiles(
    q, k, v, union_blocks, union_tokens, counts, out, lse, tokens, start, tiles, capacity, scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    G: tl.constexpr, R: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, COPIED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
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
    steps = used * SUB
    for step in tl.range(0, steps, num_stages=STAGES):
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
        k_transposed = tl.trans(k_tile)
        if (not COPIED) or step < steps:  # always true: see the top of `banded/queries.py`
            s = tl.dot(q_tile, k_transposed, input_precision=PRECISION)
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
