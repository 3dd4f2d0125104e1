"""The NSA layer: projections per branch, rotary positions, compression and gates around `tamis.attention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention import NSASpec, nsa_attention
from tamis.attention.decode import decode_attention, tile_attention
from tamis.config import Config
from tamis.model.cache import NSACache
from tamis.model.compress import AverageCompression, LearnedCompression
from tamis.model.layers import Rotary
from tamis.model.ops.heads import split_heads

TURNED = [True, False, False, True, False, True, False, False]  # queries, and keys of the selected and window branches
COLLAPSED_SHARE = 0.95  # a head whose gates give one branch more than this has collapsed
GATE_STATISTICS = ("share_compressed", "share_selected", "share_window", "entropy", "collapsed")


class NSALayer(nn.Module):
    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        model, nsa = config.model, config.nsa
        self.spec = NSASpec.of(nsa)
        self.heads, self.groups, self.dim = model.n_heads, model.n_kv_groups, model.d_k
        self.rotary = rotary
        # Queries, then keys and values of the compressed, selected and window branches: one matrix, one product.
        self.project = nn.Linear(model.dim, (model.n_heads + 6 * model.n_kv_groups) * model.d_k, bias=False)
        self.gate = nn.Linear(model.dim, model.n_heads * 3)
        self.compress_k, self.compress_v = (self._compression(nsa.phi) for _ in range(2))
        self.out = nn.Linear(model.n_heads * model.d_k, model.dim, bias=False)

    def _compression(self, phi: str) -> nn.Module:
        return LearnedCompression(self.spec, self.dim) if phi == "mlp" else AverageCompression(self.spec)

    def forward(self, x_BSE: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output, and its gates `[B,S,H,3]`."""
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, logits = self._parts(x_BSE)
        gates = self.gates(logits.flatten(2))
        k_cmp, v_cmp = self.compress(k_cmp, v_cmp)
        mixed = nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, self.spec)
        return self.out(mixed.flatten(2)), gates

    def _parts(self, x_BSE: Tensor) -> list[Tensor]:
        """Queries, keys and values as attention takes them, and the gates' logits as heads of their own, padded.

        From one product: two would each read the tokens, and leave two gradients of them to add.
        """
        gate_heads = -(-self.gate.out_features // self.dim)
        gate_weight = F.pad(self.gate.weight, (0, 0, 0, gate_heads * self.dim - self.gate.out_features))
        heads = F.linear(x_BSE, torch.cat((self.project.weight, gate_weight))).unflatten(-1, (-1, self.dim))
        sizes = [self.heads, *[self.groups] * 6, gate_heads]
        return split_heads(heads, self.rotary.cos, self.rotary.sin, sizes, TURNED)

    def extend(self, x_BSE: Tensor, cache: NSACache, start: int) -> Tensor:
        """The output for tokens `start … start+S−1`, which join those the cache holds."""
        end = start + x_BSE.shape[1]
        q, window = self._remember_tile(self._heads(x_BSE), cache, start)
        compressed = cache.compressed_BN2GD[:, : self.spec.compressed_blocks(end)]
        mixed, chosen = tile_attention(
            q, compressed, cache.selected_BT2GD[:, :end], window, self._inference_gates(x_BSE), self.spec, start,
            first_key=end - window.shape[1],
        )  # fmt: skip
        cache.chosen_BGn.copy_(chosen)
        return self.out(mixed.flatten(2))

    def step(self, x_BE: Tensor, cache: NSACache, positions_B: Tensor) -> Tensor:
        """The output for one token of each sequence, at its own position; nothing here waits for the host."""
        q = self._remember_step(self._heads(x_BE[:, None]), cache, positions_B)
        kept = (cache.compressed_BN2GD, cache.selected_BT2GD, cache.window.slots_BW2GD)
        mixed, _, _ = decode_attention(
            q, *kept, self._inference_gates(x_BE), positions_B, self.spec, into=(cache.chosen_BGn, cache.reads_BG)
        )
        return self.out(mixed.flatten(1))

    def _remember_tile(self, heads_BSCD: Tensor, cache: NSACache, start: int) -> tuple[Tensor, Tensor]:
        """Write tokens from `start` on to the cache; their queries, and the window from their first key on."""
        if cache.written_by_kernels:
            from tamis.model.ops.cache_writes import remember_tile

            return remember_tile(self, heads_BSCD, cache, start)
        end = start + heads_BSCD.shape[1]
        positions = torch.arange(start, end, device=heads_BSCD.device)
        q, raw, selected, window = self._rotated(heads_BSCD, positions)
        before, after = self.spec.compressed_blocks(start), self.spec.compressed_blocks(end)
        pending = torch.cat((cache.tail.newest(start - before * self.spec.d, start), raw), dim=1)
        cache.compressed_BN2GD[:, before:after] = torch.stack(
            self.compress(pending[:, :, 0], pending[:, :, 1], before), dim=2
        )
        cache.selected_BT2GD[:, start:end] = selected
        recent = torch.cat((cache.window.newest(min(start, self.spec.w - 1), start), window), dim=1)
        cache.tail.write(raw, start)
        cache.window.write(window, start)
        return q, recent

    def _remember_step(self, heads_B1CD: Tensor, cache: NSACache, positions_B: Tensor) -> Tensor:
        """Write one token of each sequence to the cache; their queries."""
        if cache.written_by_kernels:
            from tamis.model.ops.cache_writes import remember_step

            return remember_step(self, heads_B1CD, cache, positions_B)
        # Sequences stand where a tile's tokens stand: each has its own position.
        q, raw, selected, window = (t[0] for t in self._rotated(heads_B1CD.transpose(0, 1), positions_B))
        cache.tail.write_one(raw, positions_B)
        k_cmp, v_cmp = self._compress_unrotated(*cache.tail.newest_of_each(positions_B).unbind(2))
        k_cmp = self.rotary(k_cmp.transpose(0, 1), positions_B)[0]  # a block that ends now is rotated to now
        cache.write_block(torch.stack((k_cmp, v_cmp[:, 0]), dim=1), positions_B)
        cache.write_one(selected, positions_B)
        cache.window.write_one(window, positions_B)
        return q

    def _rotated(self, heads_BSCD: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, and keys with values `[B,S,2,G,D]`: unrotated for compression, rotated for selection and window."""
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = self._by_branch(heads_BSCD)
        q, k_sel, k_win = (self.rotary(t, positions_S) for t in (q, k_sel, k_win))
        pairs = ((k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win))
        raw, selected, window = (torch.stack(pair, dim=2) for pair in pairs)
        return q, raw, selected, window

    def _heads(self, x_BSE: Tensor) -> Tensor:
        return self.project(x_BSE).unflatten(-1, (-1, self.dim))

    def _by_branch(self, heads_BSCD: Tensor) -> list[Tensor]:
        """Queries `[B,S,H,D]` and the six keys and values `[B,S,G,D]`, unrotated."""
        return list(heads_BSCD.split([self.heads] + [self.groups] * 6, dim=2))

    def gates(self, logits_BSN: Tensor) -> Tensor:
        """`[B,S,H,3]` from their logits, which padding may follow."""
        biased = logits_BSN[..., : self.gate.out_features].float() + self.gate.bias
        return torch.sigmoid(biased).to(logits_BSN.dtype).unflatten(-1, (self.heads, 3))

    def _inference_gates(self, x_BSE: Tensor) -> Tensor:
        """Of tokens that join a cache: by a product of their own, whose weights lie together already."""
        return torch.sigmoid(self.gate(x_BSE)).unflatten(-1, (self.heads, 3))

    def compress(self, k_BSGD: Tensor, v_BSGD: Tensor, first_block: int = 0) -> tuple[Tensor, Tensor]:
        """Compressed keys, rotated to their block's last position, and values; blocks count from `first_block`."""
        k, v = self._compress_unrotated(k_BSGD, v_BSGD)
        blocks = torch.arange(first_block, first_block + k.shape[1], device=k.device)
        return self.rotary(k, blocks * self.spec.d + self.spec.l - 1), v

    def _compress_unrotated(self, k_BSGD: Tensor, v_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        return self.compress_k(k_BSGD), self.compress_v(v_BSGD)


@torch.no_grad()
def gate_statistics(gates_BSH3: Tensor) -> Tensor:
    """Five numbers, in the order of GATE_STATISTICS: mean share per branch, entropy of the shares in nats, collapse."""
    gates = gates_BSH3.detach().float()
    shares = gates / gates.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    entropy = -(shares * shares.clamp_min(1e-9).log()).sum(dim=-1).mean()
    collapsed = (shares.amax(dim=-1) > COLLAPSED_SHARE).float().mean()
    return torch.cat((shares.mean(dim=(0, 1, 2)), torch.stack((entropy, collapsed))))
