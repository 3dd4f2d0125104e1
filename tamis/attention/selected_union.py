"""Selected attention, query tile by query tile: neighbouring tokens walk all blocks that any of them chose.

A row that did not choose a block lets it pass: masking whole rows costs nothing per score. While most blocks are chosen
by some token of the tile (short sequences, or neighbours that choose alike) this is dense attention at dense speed, and
nothing but the result is written. Rows of a tile are tokens × heads of the group.

Shapes: B batch, S tokens, H query heads, G groups, R = H/G heads per group, D head dim, n slots (n_sel).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.attention.selected_rows import LOG2E, config, key_tiles, load_rows, store_rows
from tamis.attention.spec import NSASpec
from tamis.attention.tiles import padded, precision

WORD = 64  # blocks per word of a token's choices


def forward(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, ids_BSGn: Tensor, spec: NSASpec) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of the selected branch."""
    batch, tokens, heads, dim = q_BSHD.shape
    groups, slots = ids_BSGn.shape[2:]
    heads_per_group = heads // groups
    settings = _forward_config(q_BSHD, heads_per_group)
    tile = settings["ROWS"] // heads_per_group
    tiles, blocks = triton.cdiv(tokens, tile), spec.selection_blocks(tokens)
    words = triton.cdiv(blocks, WORD)
    device = q_BSHD.device
    choices = torch.empty((batch, groups, tokens, words), dtype=torch.int64, device=device)
    union = torch.empty((batch, groups, tiles, blocks + 1), dtype=torch.int32, device=device)  # one spare is read ahead
    first = torch.empty((batch, groups, tiles, words + 2), dtype=torch.int32, device=device)
    _unite_choices[(tiles, batch * groups)](
        ids_BSGn, choices, union, first, tokens, tiles, blocks, *ids_BSGn.stride()[:3],
        G=groups, N=slots, BS=triton.next_power_of_2(slots), W=words, WORD=WORD, L_SEL=spec.l_sel,
        TILE=tile, BT=triton.next_power_of_2(tile),
    )  # fmt: skip
    out = torch.empty((batch, tokens, heads, dim), dtype=q_BSHD.dtype, device=device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=device)
    keys, parts = key_tiles(spec)
    _forward_tiles[(batch * groups, tiles)](
        q_BSHD, k_BSGD, v_BSGD, choices, union, first, out, lse, tokens, blocks, dim**-0.5 * LOG2E,
        *q_BSHD.stride()[:3], *k_BSGD.stride()[:3], *v_BSGD.stride()[:3],
        G=groups, R=heads_per_group, W=words, WORD=WORD, L_SEL=spec.l_sel, SUB=parts, BN=keys, D=dim, BD=padded(dim),
        PRECISION=precision(q_BSHD.dtype), **settings,
    )  # fmt: skip
    return out, lse


def _forward_config(q_BSHD: Tensor, heads_per_group: int) -> dict[str, int]:
    if q_BSHD.dtype == torch.float32 or q_BSHD.shape[-1] > 128:
        return config(max(32, triton.next_power_of_2(heads_per_group)), 4, 1)
    return config(128, 4, 3) if q_BSHD.shape[-1] <= 64 else config(128, 8, 3)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _unite_choices(
    ids, choices, union, first, tokens, tiles, blocks, i_b, i_s, i_g,
    G: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, W: tl.constexpr, WORD: tl.constexpr, L_SEL: tl.constexpr,
    TILE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """For a tile of tokens: each token's choices as bits, the blocks any of them chose in ascending order, where each
    word's blocks begin in that list (then its end), and how many of them lie wholly before the tile's queries."""
    tile = tl.program_id(0)
    sequence_group = tl.program_id(1).to(tl.int64)
    in_tile = tl.arange(0, BT)
    token = tile * TILE + in_tile
    token_live = (in_tile < TILE) & (token < tokens)
    slot = tl.arange(0, BS)
    ids += (sequence_group // G) * i_b + (sequence_group % G) * i_g
    exists = token_live[:, None] & (slot < N)[None, :]
    block = tl.load(ids + token.to(tl.int64)[:, None] * i_s + slot[None, :], mask=exists, other=-1)
    union += (sequence_group * tiles + tile) * (blocks + 1)
    first += (sequence_group * tiles + tile) * (W + 2)
    choices += (sequence_group * tokens + token) * W
    bit = tl.arange(0, WORD)
    one = tl.full((1, 1), 1, tl.int64)
    used = 0
    whole = 0
    for word in range(W):
        bits = tl.where(block // WORD == word, one << (block % WORD).to(tl.int64), 0)
        bits = tl.where(block >= 0, bits, 0)
        chosen = tl.reduce(bits, 1, _or)
        tl.store(choices + word, chosen, mask=token_live)
        present = ((tl.reduce(chosen, 0, _or) >> bit.to(tl.int64)) & 1).to(tl.int32)
        candidate = word * WORD + bit
        tl.store(union + used + tl.cumsum(present, 0) - present, candidate, mask=present == 1)
        tl.store(first + word, used)
        used += tl.sum(present, 0)
        whole += tl.sum(tl.where((candidate + 1) * L_SEL <= tile * TILE + 1, present, 0), 0)
    tl.store(first + W, used)
    tl.store(first + W + 1, whole)


@triton.jit
def _forward_tiles(
    q, k, v, choices, union, first, out, lse, tokens, blocks, scale,
    q_b, q_s, q_h, k_b, k_s, k_g, v_b, v_s, v_g,
    G: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WORD: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`scale` includes log2(e). The longest tiles start first."""
    sequence_group = tl.program_id(0).to(tl.int64)
    tiles = tl.num_programs(1)
    tile = tiles - 1 - tl.program_id(1)
    sequence, group = sequence_group // G, sequence_group % G
    row = tl.arange(0, ROWS)
    token = tile * (ROWS // R) + row // R
    live = (row < (ROWS // R) * R) & (token < tokens)
    token64 = token.to(tl.int64)
    head = group * R + row % R
    q_tile = load_rows(q, sequence * q_b + token64 * q_s + head * q_h, live, D, BD)
    k += sequence * k_b + group * k_g
    v += sequence * v_b + group * v_g
    union += (sequence_group * tiles + tile) * (blocks + 1)
    first += (sequence_group * tiles + tile) * (W + 2)
    choices += (sequence_group * tokens + token64) * W
    whole = tl.load(first + W + 1)  # the blocks behind these hold keys that some row must not see

    column = tl.arange(0, BN)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BD), tl.float32)
    for word in range(W):
        row_choices = tl.load(choices + word, mask=live, other=0)
        begin = tl.load(first + word)
        end = tl.load(first + word + 1)
        next_block = tl.load(union + begin)
        for step in range(begin * SUB, end * SUB):
            block = next_block
            next_block = tl.load(union + (step + 1) // SUB)
            in_block = (step % SUB) * BN + column
            key = block * L_SEL + in_block
            key_live = key < tokens
            if L_SEL % BN != 0:
                key_live = key_live & (in_block < L_SEL)
            k_tile = load_rows(k, key.to(tl.int64) * k_s, key_live, D, BD)
            v_tile = load_rows(v, key.to(tl.int64) * v_s, key_live, D, BD)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if (step >= whole * SUB) | (L_SEL % BN != 0):
                s = tl.where(key_live[None, :] & (key[None, :] <= token[:, None]), s, -float("inf"))
            block_top = tl.max(s, 1) * scale
            chosen = ((row_choices >> (block % WORD).to(tl.int64)) & 1) == 1
            chosen = chosen & (block_top > -float("inf"))
            new_top = tl.where(chosen, tl.maximum(top, block_top), top)
            # exp2(−inf) = 0: rows that did not choose the block, or see none of it, let it pass.
            p = tl.exp2(s * scale - tl.where(chosen, new_top, float("inf"))[:, None])
            decay = tl.exp2(top - tl.where(new_top == -float("inf"), 0.0, new_top))
            total = total * decay + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=PRECISION)
            top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out, ((sequence * tokens + token64) * (G * R) + head) * D, acc, live, D, BD)
    natural = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + (sequence * (G * R) + head) * tokens + token64, natural, mask=live)
