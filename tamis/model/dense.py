"""The dense twin: ordinary causal attention in the same trunk, for honest comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.decode import use_kernels
from tamis.config import Config
from tamis.model.cache import DenseCache
from tamis.model.dense_attention import causal_attention
from tamis.model.layers import Rotary
from tamis.model.ops.heads import split_heads


class DenseLayer(nn.Module):
    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        model = config.model
        self.heads, self.groups, self.dim = model.n_heads, model.n_kv_groups, model.d_k
        self.rotary = rotary
        self.may_use_cudnn = config.runtime.may_use_cudnn
        self.project = nn.Linear(model.dim, (model.n_heads + 2 * model.n_kv_groups) * model.d_k, bias=False)
        self.out = nn.Linear(model.n_heads * model.d_k, model.dim, bias=False)

    def forward(self, x_BSE: Tensor) -> tuple[Tensor, None]:
        sizes, turned = [self.heads, self.groups, self.groups], [True, True, False]
        q, k, v = split_heads(self._heads(x_BSE), self.rotary.cos, self.rotary.sin, sizes, turned)
        return self.out(causal_attention(q, k, v, self.may_use_cudnn).flatten(2)), None

    def extend(self, x_BSE: Tensor, cache: DenseCache, start: int) -> Tensor:
        """The output for tokens `start … start+S−1`, which join those the cache holds."""
        end = start + x_BSE.shape[1]
        heads = self._heads(x_BSE)
        if use_kernels(heads):
            from tamis.model.ops.cache_writes import remember_dense

            q = remember_dense(self, heads, cache, start)
        else:
            q, k, v = self._rotated(heads, torch.arange(start, end, device=x_BSE.device))
            cache.kept_BT2GD[:, start:end] = torch.stack((k, v), dim=2)
        k, v = (t.transpose(1, 2) for t in cache.kept_BT2GD[:, :end].unbind(2))
        out = _attend_to_end(q.transpose(1, 2), k, v)
        return self.out(out.transpose(1, 2).flatten(2))

    def step(self, x_BE: Tensor, cache: DenseCache, positions_B: Tensor) -> Tensor:
        """The output for one token of each sequence, at its own position; the capacity is known, the length is not."""
        heads = self._heads(x_BE[:, None])
        if use_kernels(heads):
            from tamis.model.ops.cache_writes import remember_dense

            q = remember_dense(self, heads, cache, positions_B)[:, 0]
        else:
            q, k, v = (t[0] for t in self._rotated(heads.transpose(0, 1), positions_B))
            cache.write_one(torch.stack((k, v), dim=1), positions_B)
        return self.out(_attend_one(q, cache, positions_B).flatten(1))

    def _heads(self, x_BSE: Tensor) -> Tensor:
        return self.project(x_BSE).unflatten(-1, (-1, self.dim))

    def _rotated(self, heads_BSCD: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads_BSCD.split([self.heads, self.groups, self.groups], dim=2)
        return self.rotary(q, positions_S), self.rotary(k, positions_S), v


def _attend_one(q_BHD: Tensor, cache: DenseCache, positions_B: Tensor) -> Tensor:
    """Attention of one query of each sequence to its tokens up to its position, `[B,H,D]`."""
    halves = q_BHD.is_cuda and q_BHD.element_size() == 2 and q_BHD.shape[-1] % 8 == 0
    if halves and torch.backends.cuda.flash_sdp_enabled():
        # Flash attention splits the keys over programs and reads their number on the device. The function that PyTorch
        # documents for this takes no groups in every version, so the operation beneath it is called.
        first = torch.arange(len(q_BHD) + 1, dtype=torch.int32, device=q_BHD.device)
        k, v = (t.flatten(0, 1) for t in cache.kept_BT2GD.unbind(2))
        tokens, seen = cache.kept_BT2GD.shape[1], (positions_B + 1).int()
        return torch.ops.aten._flash_attention_forward(
            q_BHD, k, v, first, first * tokens, 1, tokens, 0.0, False, False, seqused_k=seen
        )[0]
    k, v = (t.transpose(1, 2) for t in cache.kept_BT2GD.unbind(2))
    visible = torch.arange(k.shape[2], device=k.device) <= positions_B[:, None]
    # The heads of a group see the same keys: as its rows they share one read of them.
    q_BGRD = q_BHD.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(q_BGRD, k, v, visible[:, None, None]).flatten(1, 2)


def _attend_to_end(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Causal attention of queries that stand at the end of the keys."""
    queries, keys = q_BHSD.shape[2], k_BGTD.shape[2]
    if queries == keys:
        return F.scaled_dot_product_attention(q_BHSD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True)
    if q_BHSD.is_cuda:  # flash attention knows this mask by itself; a tile's mask over 64k keys would fill the memory
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler: a second that a start can spare

        visible: Tensor = causal_lower_right(queries, keys)
    else:
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return F.scaled_dot_product_attention(q_BHSD, k_BGTD, v_BGTD, visible, enable_gqa=True)
