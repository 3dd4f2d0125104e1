"""Pack documents of different lengths into one row: each attends as if it were alone."""

import torch

from tamis.attention import NSAAttention, NSASpec

spec = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=16)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = NSAAttention(dim=64, heads=4, kv_heads=2, head_dim=16, spec=spec, max_len=256).to(device)

lengths = [5, 100, 1, 58]
documents = [torch.randn(1, n, 64, device=device) for n in lengths]
cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()  # offsets: [0, 5, 105, 106, 164]

packed = layer(torch.cat(documents, dim=1), cu_seqlens=cu_seqlens)  # [1, 164, 64]
alone = torch.cat([layer(x) for x in documents], dim=1)
print(f"packed {tuple(packed.shape)}; differs from one by one by {(packed - alone).abs().max().item():.1e}")
