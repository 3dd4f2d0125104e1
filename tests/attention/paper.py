"""Native Sparse Attention stated a second time, from the paper: float64, one query and one head at a time, plain loops.

Slow and obvious on purpose. It shares nothing with the package but the five numbers of the spec, so an error would have
to be made twice to go unseen.
Shapes: q [B,S,Hq,D]; k_cmp, v_cmp [B,Nc,G,D]; other keys and values [B,S,G,D]; gates [B,S,Hq,3].
"""

import torch
from torch import Tensor

from tamis.attention import NSASpec


def softmax(logits: Tensor) -> Tensor:
    weights = torch.exp(logits - logits.max())
    return weights / weights.sum()


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor, seen: list[int]) -> Tensor:
    """One query [D] over the seen ones of keys and values [T,D]; nothing to see gives exactly zero."""
    if not seen:
        return torch.zeros_like(query)
    return softmax(keys[seen] @ query / query.numel() ** 0.5) @ values[seen]


def visible_compressed_blocks(t: int, blocks: int, spec: NSASpec) -> list[int]:
    """A compressed block is visible once its last token is not in the future."""
    return [i for i in range(blocks) if i * spec.d + spec.l - 1 <= t]


def block_scores(queries: Tensor, keys: Tensor, t: int, spec: NSASpec) -> list[float]:
    """Importance of each selection block that exists at time t, for a group: queries [R,D], compressed keys [Nc,D]."""
    scores = [0.0] * (t // spec.l_sel + 1)
    visible = visible_compressed_blocks(t, len(keys), spec)
    for query in queries if visible else []:
        weights = softmax(keys[visible] @ query / query.numel() ** 0.5)
        for weight, i in zip(weights.tolist(), visible, strict=True):
            for piece_start in range(i * spec.d, i * spec.d + spec.l, spec.d):
                scores[piece_start // spec.l_sel] += weight
    return scores


def chosen_blocks(scores: list[float], t: int, spec: NSASpec) -> list[int]:
    """Block 0 and the two newest always; the rest by score, the lower index first where scores are equal."""
    current = t // spec.l_sel
    forced = {j for j in (0, current - 1, current) if j >= 0}
    others = [j for j in range(current + 1) if j not in forced]
    others.sort(key=lambda j: (-scores[j], j))
    return sorted([*forced, *others[: max(0, spec.n_sel - len(forced))]])


def select(q: Tensor, k_cmp: Tensor, spec: NSASpec) -> list[list[list[list[int]]]]:
    """The chosen block ids as nested lists [batch][t][group], each ascending and without padding."""
    q, k_cmp = q.detach().double(), k_cmp.detach().double()
    batch, length, heads, _ = q.shape
    groups = k_cmp.shape[2]
    ratio = heads // groups

    def at(b: int, t: int, g: int) -> list[int]:
        queries = q[b, t, g * ratio : (g + 1) * ratio]
        return chosen_blocks(block_scores(queries, k_cmp[b, :, g], t, spec), t, spec)

    return [[[at(b, t, g) for g in range(groups)] for t in range(length)] for b in range(batch)]


def branches(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    spec: NSASpec,
) -> Tensor:
    """The three branch outputs [B,S,Hq,3,D] in the order compressed, selected, window."""
    batch, length, heads, _ = q.shape
    groups = k_sel.shape[2]
    ids = select(q, k_cmp, spec)

    def at(b: int, t: int, h: int) -> Tensor:
        g = h // (heads // groups)
        blocks = visible_compressed_blocks(t, k_cmp.shape[1], spec)
        chosen = [s for j in ids[b][t][g] for s in range(j * spec.l_sel, (j + 1) * spec.l_sel) if s <= t]
        window = list(range(max(0, t - spec.w + 1), t + 1))
        return torch.stack(
            [
                softmax_attention(q[b, t, h], k_cmp[b, :, g], v_cmp[b, :, g], blocks),
                softmax_attention(q[b, t, h], k_sel[b, :, g], v_sel[b, :, g], chosen),
                softmax_attention(q[b, t, h], k_win[b, :, g], v_win[b, :, g], window),
            ]
        )

    rows = [[torch.stack([at(b, t, h) for h in range(heads)]) for t in range(length)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in rows])


def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
) -> Tensor:
    """The gated sum of the three branches [B,S,Hq,D]."""
    return (gates[..., None] * branches(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, spec)).sum(dim=-2)
