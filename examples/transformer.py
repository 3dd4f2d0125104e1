"""Use the layer in a small transformer: train it on a copy task, then decode with caches."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention import NSAAttention, NSASpec

SPEC = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=16)
VOCABULARY, WIDTH, TOKENS = 16, 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = NSAAttention(WIDTH, heads=4, kv_heads=2, head_dim=16, spec=SPEC, max_len=TOKENS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def step(self, x: Tensor, cache: object) -> Tensor:
        x = x + self.attention.step(self.norms[0](x), cache)
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Return the logits of every token, read one at a time through the caches."""
        caches = [block.attention.new_cache(len(ids), ids.shape[1]) for block in self.blocks]
        logits = []
        for column in ids.unbind(1):
            x = self.embedding(column)
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block.step(x, cache)
            logits.append(self.head(x))
        return torch.stack(logits, dim=1)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Transformer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(10):
    ids = torch.randint(VOCABULARY, (2, TOKENS // 2), device=device).repeat(1, 2)  # the second half repeats the first
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
difference = (model.decode(ids) - model(ids)).abs().max().item()
print(f"loss {loss.item():.3f}; decoding through the caches differs by {difference:.1e}")
