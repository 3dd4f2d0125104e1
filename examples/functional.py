"""Call NSA as a function: one set of queries, keys and values, and three gates per head."""

import torch

from tamis.attention import NSASpec, nsa

B, S, H, G, D = 2, 300, 8, 2, 32  # batch, tokens, query heads, key/value heads, head dim
device = "cuda" if torch.cuda.is_available() else "cpu"
spec = NSASpec(l=16, d=8, l_sel=32, n_sel=4, w=64)

q = torch.randn(B, S, H, D, device=device, requires_grad=True)
k, v = (torch.randn(B, S, G, D, device=device, requires_grad=True) for _ in range(2))
gates = torch.sigmoid(torch.randn(B, S, H, 3, device=device))  # compressed, selected, window

out = nsa(q, k, v, gates, spec)  # [B, S, H, D]
out.square().mean().backward()
print(f"output {tuple(out.shape)}, gradient of k {tuple(k.grad.shape)}")
