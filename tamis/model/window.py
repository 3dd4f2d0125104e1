"""Sliding-window attention as a layer of its own, for models that alternate cheap and sparse layers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.attention.cache import Ring
from tamis.attention.decode import use_kernels
from tamis.attention.packing import PackedRow, document_of_tokens
from tamis.attention.rotary import Rotary
from tamis.config import Config
from tamis.model.dense import DenseAttention, causal_attention


class WindowCache:
    """The newest keys and values of one window layer."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def row(self, index: int) -> WindowCache:
        one = copy.copy(self)
        one.ring = Ring(self.ring.slots_BW2GD[index : index + 1])
        return one

    def tensors(self) -> list[Tensor]:
        return [self.ring.slots_BW2GD]


class WindowAttention(DenseAttention):
    """Each token attends to itself and the `nsa.w` − 1 tokens before it."""

    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__(config, rotary)
        self.window = config.nsa.w

    def _attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, row: PackedRow | None) -> Tensor:
        if use_kernels(q_BSHD, groups=self.groups):
            from tamis.attention.kernels.window import sliding_window  # here, because Triton may be missing

            return sliding_window(q_BSHD, k_BSGD, v_BSGD, self.window, row)
        return chunked_window_attention(q_BSHD, k_BSGD, v_BSGD, self.window, row.cu_seqlens if row else None)

    def layer_cache(self, batch: int, max_len: int) -> WindowCache:  # type: ignore[override]
        weight, slots = self.project.weight, min(self.window, max_len)
        shape = (batch, slots, 2, self.groups, self.dim)
        return WindowCache(Ring(torch.zeros(shape, dtype=weight.dtype, device=weight.device)))

    def attend_tile(self, x_BSE: Tensor, cache: WindowCache, start: int) -> Tensor:  # type: ignore[override]
        end = start + x_BSE.shape[1]
        q, k, v = self._rotated(self._heads(x_BSE), torch.arange(start, end, device=x_BSE.device))
        new = torch.stack((k, v), dim=2)
        recent = torch.cat((cache.ring.newest(min(start, self.window - 1), start), new), dim=1)
        cache.ring.write(new, start)
        distance = torch.arange(start, end)[:, None] - torch.arange(end - recent.shape[1], end)
        visible = (distance >= 0) & (distance < self.window)
        return self.out(_masked_attention(q, recent, visible.to(q.device)).flatten(2))

    def attend_token(self, x_BE: Tensor, cache: WindowCache, positions_B: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (t[0] for t in self._rotated(self._heads(x_BE[:, None]).transpose(0, 1), positions_B))
        cache.ring.write_one(torch.stack((k, v), dim=1), positions_B)
        written = torch.arange(cache.ring.size, device=q.device) <= positions_B[:, None]
        out = _masked_attention(q[:, None], cache.ring.slots_BW2GD, written[:, None, None])
        return self.out(out.flatten(1))


def chunked_window_attention(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, window: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return causal attention `[B,S,H,D]` of every query over the newest `window` keys, its own included.

    Later tokens are cut into chunks of `window` queries, which see their own chunk of keys and the one before: the cost
    grows with S. One small mask serves all chunks, or one each where `cu_seqlens` packs documents (B = 1).
    """
    batch, tokens = q_BSHD.shape[:2]
    document = None if cu_seqlens is None else document_of_tokens(cu_seqlens, tokens)
    q, k, v = (x[:, :window] for x in (q_BSHD, k_BSGD, v_BSGD))
    if document is None:
        first = causal_attention(q, k, v)
    else:
        visible = (document[:window, None] == document[:window]).tril()
        first = _masked_attention(q, torch.stack((k, v), dim=2), visible)
    if tokens <= window:
        return first
    chunks = -(-tokens // window) - 1
    padding = (chunks + 1) * window - tokens
    q = F.pad(q_BSHD[:, window:], (0, 0, 0, 0, 0, padding)).unflatten(1, (chunks, window)).flatten(0, 1)
    keys_and_values = F.pad(torch.stack((k_BSGD, v_BSGD), dim=2), (0, 0, 0, 0, 0, 0, 0, padding))
    before, own = (
        x.unflatten(1, (chunks, window)) for x in (keys_and_values[:, :-window], keys_and_values[:, window:])
    )
    distance = torch.arange(window, device=q.device)[:, None] + window - torch.arange(2 * window, device=q.device)
    visible = (distance >= 0) & (distance < window)
    if document is not None:
        of_chunks = F.pad(document, (0, padding), value=-1).unflatten(0, (chunks + 1, window))
        of_keys = torch.cat((of_chunks[:-1], of_chunks[1:]), dim=1)
        visible = (visible & (of_chunks[1:, :, None] == of_keys[:, None])).unsqueeze(1)  # [chunks, 1, queries, keys]
    rest = _masked_attention(q, torch.cat((before, own), dim=2).flatten(0, 1), visible)
    return torch.cat((first, rest.reshape(batch, chunks * window, *q.shape[2:])[:, : tokens - window]), dim=1)


def _masked_attention(q_BSHD: Tensor, keys_and_values_BT2GD: Tensor, visible: Tensor) -> Tensor:
    """Return attention `[B,S,H,D]` over the visible keys."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, *keys_and_values_BT2GD.unbind(2)))
    if q.is_cuda:  # no fused GPU kernel takes both groups and a mask
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
