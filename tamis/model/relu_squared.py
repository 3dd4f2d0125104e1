"""The feed-forward layer with the square of ReLU: two products where SwiGLU has three."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class ReLUSquared(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())
