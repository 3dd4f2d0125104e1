"""Dense causal attention in the same trunk: the twin that NSA is compared with."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.decode import use_kernels
from tamis.attention.packing import PackedRow, document_of_tokens
from tamis.attention.rotary import Rotary, normalise_heads, split_heads
from tamis.config import Config

# By the version, because the function's module loads the compiler (1.5 s).
VARLEN_TAKES_WINDOWS = torch.__version__ >= (2, 11)  # type: ignore[operator]


class DenseCache:
    """The keys and values of one dense layer: B sequences, T tokens, 2: key, then value, G groups, D head dim."""

    def __init__(
        self, groups: int, dim: int, batch: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cached_BT2GD = torch.zeros(batch, max_len, 2, groups, dim, dtype=dtype, device=device)

    def write_one(self, new_B2GD: Tensor, positions_B: Tensor) -> None:
        rows = torch.arange(len(positions_B), device=positions_B.device)
        self.cached_BT2GD[rows, positions_B] = new_B2GD

    def row(self, index: int) -> DenseCache:
        one = copy.copy(self)
        one.cached_BT2GD = self.cached_BT2GD[index : index + 1]
        return one

    def tensors(self) -> list[Tensor]:
        return [self.cached_BT2GD]


class DenseAttention(nn.Module):
    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        model = config.model
        self.heads, self.groups, self.dim = model.n_heads, model.n_kv_groups, model.d_k
        self.rotary, self.qk_norm = rotary, model.qk_norm
        self.project = nn.Linear(model.dim, (model.n_heads + 2 * model.n_kv_groups) * model.d_k, bias=False)
        self.out = nn.Linear(model.n_heads * model.d_k, model.dim, bias=False)

    def forward(self, x_BSE: Tensor, row: PackedRow | None = None) -> Tensor:
        """Return the output `[B,S,E]`; `row` packs documents, as for `NSAAttention`."""
        sizes, rotated = [self.heads, self.groups, self.groups], [True, True, False]
        q, k, v = split_heads(self._heads(x_BSE), *self.rotary.tables(row), sizes, rotated)
        return self.out(self._attend(q, k, v, row).flatten(2))

    def _attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, row: PackedRow | None) -> Tensor:
        if row is not None:
            return packed_attention(q_BSHD, k_BSGD, v_BSGD, row.cu_seqlens, self.rotary.cos.shape[0])
        return causal_attention(q_BSHD, k_BSGD, v_BSGD)

    def layer_cache(self, batch: int, max_len: int) -> DenseCache:
        """Return this layer's part of a cache, in its dtype and on its device."""
        weight = self.project.weight
        return DenseCache(self.groups, self.dim, batch, max_len, weight.dtype, weight.device)

    def attend_tile(self, x_BSE: Tensor, cache: DenseCache, start: int) -> Tensor:
        """Return the output for tokens `start … start+S−1` and write them to the cache."""
        end = start + x_BSE.shape[1]
        heads = self._heads(x_BSE)
        if use_kernels(heads):
            from tamis.attention.kernels.cache_writes import write_dense

            q = write_dense(self, heads, cache.cached_BT2GD, start)
        else:
            q, k, v = self._rotated(heads, torch.arange(start, end, device=x_BSE.device))
            cache.cached_BT2GD[:, start:end] = torch.stack((k, v), dim=2)
        k, v = (t.transpose(1, 2) for t in cache.cached_BT2GD[:, :end].unbind(2))
        out = _attend_to_end(q.transpose(1, 2), k, v)
        return self.out(out.transpose(1, 2).flatten(2))

    def attend_token(self, x_BE: Tensor, cache: DenseCache, positions_B: Tensor) -> Tensor:
        """Return the output for one token of each sequence, at its own position, without a host sync."""
        heads = self._heads(x_BE[:, None])
        if use_kernels(heads):
            from tamis.attention.kernels.cache_writes import write_dense

            q = write_dense(self, heads, cache.cached_BT2GD, positions_B)[:, 0]
        else:
            q, k, v = (t[0] for t in self._rotated(heads.transpose(0, 1), positions_B))
            cache.write_one(torch.stack((k, v), dim=1), positions_B)
        return self.out(_attend_one(q, cache, positions_B).flatten(1))

    def _heads(self, x_BSE: Tensor) -> Tensor:
        heads = self.project(x_BSE).unflatten(-1, (-1, self.dim))
        return normalise_heads(heads, self.heads + self.groups) if self.qk_norm else heads

    def _rotated(self, heads_BSCD: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads_BSCD.split([self.heads, self.groups, self.groups], dim=2)
        return self.rotary(q, positions_S), self.rotary(k, positions_S), v


def causal_attention(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
    """Return causal attention `[B,S,H,D]` by the kernel PyTorch chooses."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BSGD, v_BSGD))
    if not takes_groups(q):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def packed_attention(q_1SHD: Tensor, k_1SGD: Tensor, v_1SGD: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return causal attention `[1,S,H,D]` inside each document; none has more than `max_seqlen` tokens."""
    if takes_packed_rows(q_1SHD):
        return flash_packed_attention(q_1SHD, k_1SGD, v_1SGD, cu_seqlens, max_seqlen)
    document = document_of_tokens(cu_seqlens, q_1SHD.shape[1])
    visible = (document[:, None] == document).tril()
    q, k, v = (x.transpose(1, 2) for x in (q_1SHD, *_for_every_head(q_1SHD, k_1SGD, v_1SGD)))
    return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)


def flash_packed_attention(
    q_1SHD: Tensor, k_1SGD: Tensor, v_1SGD: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Return the same by flash attention."""
    from torch.nn.attention.varlen import varlen_attn  # here, because it loads slowly

    q, k, v = (x[0] for x in (q_1SHD, *_for_every_head(q_1SHD, k_1SGD, v_1SGD)))
    longest = min(len(q), max_seqlen)  # programs are started for so many tokens of every document
    causal: dict[str, Any] = {"window_size": (-1, 0)} if VARLEN_TAKES_WINDOWS else {"is_causal": True}
    return cast(Tensor, varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **causal))[None]


def takes_packed_rows(q: Tensor) -> bool:
    """Return whether flash attention takes packed rows of such queries."""
    return q.is_cuda and q.element_size() == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _for_every_head(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of each query head."""
    heads_per_group = q_BSHD.shape[2] // k_BSGD.shape[2]
    return k_BSGD.repeat_interleave(heads_per_group, dim=2), v_BSGD.repeat_interleave(heads_per_group, dim=2)


def takes_groups(q: Tensor) -> bool:
    """Return whether PyTorch has a fast kernel for groups; in float32 on a GPU it would store every score."""
    return not (q.is_cuda and q.dtype is torch.float32)


def _attend_one(q_BHD: Tensor, cache: DenseCache, positions_B: Tensor) -> Tensor:
    """Return attention `[B,H,D]` of one query of each sequence over its tokens up to its position."""
    halves = q_BHD.is_cuda and q_BHD.element_size() == 2 and q_BHD.shape[-1] % 8 == 0
    if halves and torch.backends.cuda.flash_sdp_enabled():
        # Flash attention splits the keys over programs and reads their number on the device. The documented function
        # for this takes no groups in some versions of PyTorch, so the op below it is called.
        first = torch.arange(len(q_BHD) + 1, dtype=torch.int32, device=q_BHD.device)
        k, v = (t.flatten(0, 1) for t in cache.cached_BT2GD.unbind(2))
        tokens, seen = cache.cached_BT2GD.shape[1], (positions_B + 1).int()
        return torch.ops.aten._flash_attention_forward(
            q_BHD, k, v, first, first * tokens, 1, tokens, 0.0, False, False, seqused_k=seen
        )[0]
    k, v = (t.transpose(1, 2) for t in cache.cached_BT2GD.unbind(2))
    visible = torch.arange(k.shape[2], device=k.device) <= positions_B[:, None]
    # The heads of a group see the same keys: as rows of one head they share one read of them.
    q_BGRD = q_BHD.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(q_BGRD, k, v, visible[:, None, None]).flatten(1, 2)


def _attend_to_end(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Return causal attention of queries that are the last of the keys' tokens."""
    queries, keys = q_BHSD.shape[2], k_BGTD.shape[2]
    if queries == keys:
        return F.scaled_dot_product_attention(q_BHSD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True)
    if q_BHSD.is_cuda:  # flash attention needs no mask tensor; a tile's mask over 64k keys would fill the memory
        from torch.nn.attention.bias import causal_lower_right  # here, because it loads the compiler (1 s)

        visible: Tensor = causal_lower_right(queries, keys)
    else:
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return F.scaled_dot_product_attention(q_BHSD, k_BGTD, v_BGTD, visible, enable_gqa=True)
