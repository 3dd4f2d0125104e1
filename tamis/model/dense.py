"""The dense twin: ordinary causal attention in the same trunk, for honest comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.config import Config
from tamis.model.cache import DenseCache
from tamis.model.layers import Rotary


class DenseLayer(nn.Module):
    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        model = config.model
        self.heads, self.groups, self.dim = model.n_heads, model.n_kv_groups, model.d_k
        self.rotary = rotary
        self.project = nn.Linear(model.dim, (model.n_heads + 2 * model.n_kv_groups) * model.d_k, bias=False)
        self.out = nn.Linear(model.n_heads * model.d_k, model.dim, bias=False)

    def forward(self, x_BSE: Tensor) -> tuple[Tensor, None]:
        positions = torch.arange(x_BSE.shape[1], device=x_BSE.device)
        q, k, v = self._rotated(x_BSE, positions)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2)), None

    def extend(self, x_BSE: Tensor, cache: DenseCache, start: int) -> Tensor:
        """The output for tokens `start … start+S−1`, which join those the cache holds."""
        end = start + x_BSE.shape[1]
        positions = torch.arange(start, end, device=x_BSE.device)
        q, k, v = self._rotated(x_BSE, positions)
        cache.kept_BT2GD[:, start:end] = torch.stack((k, v), dim=2)
        k, v = (t.transpose(1, 2) for t in cache.kept_BT2GD[:, :end].unbind(2))
        out = _attend_to_end(q.transpose(1, 2), k, v)
        return self.out(out.transpose(1, 2).flatten(2))

    def step(self, x_BE: Tensor, cache: DenseCache, positions_B: Tensor) -> Tensor:
        """The output for one token of each sequence, at its own position, over the whole capacity under a mask."""
        q, k, v = (t[0] for t in self._rotated(x_BE[None], positions_B))
        cache.write_one(torch.stack((k, v), dim=1), positions_B)
        k, v = (t.transpose(1, 2) for t in cache.kept_BT2GD.unbind(2))
        visible = torch.arange(k.shape[2], device=k.device) <= positions_B[:, None]
        # The heads of a group see the same keys: as its rows they share one read of them.
        out = F.scaled_dot_product_attention(q.unflatten(1, (self.groups, -1)), k, v, visible[:, None, None])
        return self.out(out.flatten(1))

    def _rotated(self, x_BSE: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.project(x_BSE).unflatten(-1, (-1, self.dim))
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=2)
        return self.rotary(q, positions_S), self.rotary(k, positions_S), v


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
