"""The dense twin: ordinary causal attention in the same trunk, for honest comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.config import Config
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
        heads = self.project(x_BSE).unflatten(-1, (-1, self.dim))
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=2)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2)), None
