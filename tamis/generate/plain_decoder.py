"""The decoder in plain PyTorch, for exported models where the `tamis` package is not installed.

It has the names and shapes of `tamis.model.Decoder`'s weights, and computes attention by the reference, on any device.
Shapes: B sequences, S tokens, E width, G key/value heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tamis.attention.compress import LearnedCompression, MeanCompression
from tamis.attention.reference import (
    compressed_attention,
    mix_branches,
    select_blocks,
    selected_attention,
    window_attention,
)
from tamis.attention.spec import NSASpec

VOCABULARY_MULTIPLE = 128  # rows of the embedding are padded to this
UNLIMITED = 1 << 40  # the window of a dense layer, in tokens
MODEL_KEYS = {
    *("name", "attention", "dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_ff"),
    *("rope_base", "rope_scale", "norm_eps", "mlp", "qk_norm", "logit_soft_cap"),
}
NSA_KEYS = {"l", "d", "l_sel", "n_sel", "w", "phi", "layers"}

Past = list[Tensor]  # what one layer keeps of the tokens read


class PlainSequence:
    """What the layers keep of one sequence. Tensors are replaced, never changed, so that copies may share them."""

    def __init__(self, pasts: list[Past], length: int = 0) -> None:
        self.pasts, self.length = pasts, length


class PlainCache:
    """The sequences of a batch; they may have different lengths."""

    def __init__(self, sequences: list[PlainSequence], max_len: int) -> None:
        self.sequences, self.max_len = sequences, max_len

    def row(self, index: int) -> PlainCache:
        """Return a view of one sequence."""
        return PlainCache([self.sequences[index]], self.max_len)

    def copy_from(self, other: PlainCache, rows: Tensor) -> None:
        """Replace the sequences with those of another cache at `rows`."""
        chosen = [other.sequences[row] for row in rows.tolist()]
        self.sequences = [PlainSequence(list(each.pasts), each.length) for each in chosen]


class PlainNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class PlainFeedForward(nn.Module):
    def __init__(self, mlp: str, dim: int, hidden: int) -> None:
        super().__init__()
        if mlp == "relu2":
            self.up = nn.Linear(dim, hidden, bias=False)
        else:
            self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.mlp, self.down = mlp, nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mlp == "relu2":
            return self.down(F.relu(self.up(x)).square())
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class PlainAttention(nn.Module):
    """A layer of any kind: NSA, or dense and window attention, which are the window branch alone."""

    def __init__(self, model: dict[str, Any], nsa: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.kind, self.heads, self.groups, self.dim = kind, model["n_heads"], model["n_kv_groups"], model["d_k"]
        self.qk_norm = model["qk_norm"]
        self.rope_base, self.rope_scale = model["rope_base"], model["rope_scale"]
        sizes = {key: nsa[key] for key in ("l", "d", "l_sel", "n_sel")}
        self.spec = NSASpec(**sizes, w=UNLIMITED if kind == "dense" else nsa["w"])
        pairs = 3 if kind == "nsa" else 1
        self.project = nn.Linear(model["dim"], (self.heads + 2 * pairs * self.groups) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, model["dim"], bias=False)
        if kind == "nsa":
            self.gate = nn.Linear(model["dim"], self.heads * 3)
            self.compress_k, self.compress_v = (self._compression(nsa["phi"]) for _ in range(2))

    def _compression(self, phi: str) -> nn.Module:
        return LearnedCompression(self.spec, self.dim) if phi == "mlp" else MeanCompression(self.spec)

    def forward(self, x_BSE: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        """Return the output of tokens `start … start+S−1`, and what the layer keeps of all tokens."""
        heads = self.project(x_BSE).unflatten(-1, (-1, self.dim))
        q, *rest = heads.split([self.heads, *[self.groups] * (6 if self.kind == "nsa" else 2)], dim=2)
        if self.qk_norm:
            q, *rest = (part if i and i % 2 == 0 else _unit(part) for i, part in enumerate((q, *rest)))
        q = self._rotated(q, start)
        attend = self._nsa if self.kind == "nsa" else self._window
        attended, kept = attend(x_BSE, q, rest, past, start)
        return self.out(attended.flatten(2)), kept

    def _window(self, _: Tensor, q: Tensor, new: Past, past: Past, start: int) -> tuple[Tensor, Past]:
        k, v = kept = _appended(past, [self._rotated(new[0], start), new[1]])
        return window_attention(q, k, v, self.spec, start), kept

    def _nsa(self, x_BSE: Tensor, q: Tensor, new: Past, past: Past, start: int) -> tuple[Tensor, Past]:
        k_raw, v_raw, k_sel, v_sel, k_win, v_win = new
        k_sel, k_win = self._rotated(k_sel, start), self._rotated(k_win, start)
        kept = _appended(past[:6], [k_raw, v_raw, k_sel, v_sel, k_win, v_win])
        k_raw, v_raw, k_sel, v_sel, k_win, v_win = kept
        first_new = self.spec.compressed_blocks(start)
        pending = slice(first_new * self.spec.d, None)
        k_cmp, v_cmp = self.compress_k(k_raw[:, pending]), self.compress_v(v_raw[:, pending])
        last = (first_new + torch.arange(k_cmp.shape[1], device=q.device)) * self.spec.d + self.spec.l - 1
        k_cmp, v_cmp = _appended(past[6:], [self._rotated_to(k_cmp, last), v_cmp])
        ids = select_blocks(q, k_cmp, self.spec, start)
        branches = (
            compressed_attention(q, k_cmp, v_cmp, self.spec, start),
            selected_attention(q, k_sel, v_sel, ids, self.spec, start),
            window_attention(q, k_win, v_win, self.spec, start),
        )
        gates = torch.sigmoid(self.gate(x_BSE)).unflatten(-1, (self.heads, 3))
        return mix_branches(branches, gates).to(q.dtype), [*kept, k_cmp, v_cmp]

    def _rotated(self, x_BSHD: Tensor, start: int) -> Tensor:
        return self._rotated_to(x_BSHD, torch.arange(start, start + x_BSHD.shape[1], device=x_BSHD.device))

    def _rotated_to(self, x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
        """Rotate pairs (i, i + D/2) by their angles, computed in float64 as far contexts need."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device=x_BSHD.device) / self.dim
        angle = torch.outer(positions_S.double() / self.rope_scale, self.rope_base**-exponent)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        first, second = x_BSHD.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


class PlainBlock(nn.Module):
    def __init__(self, model: dict[str, Any], nsa: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.attention_norm = PlainNorm(model["dim"], model["norm_eps"])
        self.attention = PlainAttention(model, nsa, kind)
        self.feed_forward_norm = PlainNorm(model["dim"], model["norm_eps"])
        self.feed_forward = PlainFeedForward(model["mlp"], model["dim"], model["d_ff"])

    def forward(self, x_BSE: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        attended, kept = self.attention(self.attention_norm(x_BSE), past, start)
        x_BSE = x_BSE + attended
        return x_BSE + self.feed_forward(self.feed_forward_norm(x_BSE)), kept


class PlainDecoder(nn.Module):
    """The language model that `config.json` describes.

    Args:
        tree: the key `tamis` of config.json: sections `model` and `nsa`.
        vocab_size: tokens the model predicts.
        max_len: longest sequence it takes.
    """

    def __init__(self, tree: dict[str, Any], vocab_size: int, max_len: int) -> None:
        super().__init__()
        model, nsa = tree["model"], tree["nsa"]
        if unknown := sorted({*model} - MODEL_KEYS | {*nsa} - NSA_KEYS):
            raise ValueError(f"this model has {', '.join(unknown)}, which needs the tamis package: pip install tamis")
        self.vocab_size, self.max_len, self.soft_cap = vocab_size, max_len, model["logit_soft_cap"]
        rows = math.ceil(vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.embedding = nn.Embedding(rows, model["dim"])
        layers = "dense" if model["attention"] == "dense" else nsa["layers"]
        kinds = [layers] if isinstance(layers, str) else layers
        self.blocks = nn.ModuleList(PlainBlock(model, nsa, kinds[i % len(kinds)]) for i in range(model["n_layers"]))
        self.norm = PlainNorm(model["dim"], model["norm_eps"])

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, None]:
        """Return the final hidden states `[B,S,E]`; the second value stands where `Decoder` returns statistics."""
        if tokens_BS.shape[1] > self.max_len:
            raise ValueError(f"{tokens_BS.shape[1]} tokens are more than the {self.max_len} this model was built for")
        return self._read(tokens_BS, PlainSequence([[] for _ in self.blocks])), None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.embedding.weight[: self.vocab_size].to(hidden.dtype))
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def new_cache(self, batch: int, max_len: int) -> PlainCache:
        return PlainCache([PlainSequence([[] for _ in self.blocks]) for _ in range(batch)], max_len)

    @torch.no_grad()
    def extend(self, tokens_BS: Tensor, cache: PlainCache) -> Tensor:
        """Append S tokens to each sequence; return their final hidden states `[B,S,E]`."""
        longest = max(sequence.length for sequence in cache.sequences) + tokens_BS.shape[1]
        if longest > self.max_len:
            raise ValueError(f"{longest} tokens are more than the {self.max_len} this model was built for")
        rows = zip(tokens_BS, cache.sequences, strict=True)
        return torch.cat([self._read(tokens[None], sequence) for tokens, sequence in rows])

    def _read(self, tokens_BS: Tensor, sequence: PlainSequence) -> Tensor:
        x = self.embedding(tokens_BS)
        for number, block in enumerate(self.blocks):
            x, sequence.pasts[number] = block(x, sequence.pasts[number], sequence.length)
        sequence.length += tokens_BS.shape[1]
        return self.norm(x)


class PlainStep:
    """Appends one token to each sequence of a cache; returns the hidden states `[B,E]` that predict the next."""

    def __init__(self, model: PlainDecoder, cache: PlainCache) -> None:
        self.model, self.cache = model, cache

    def __call__(self, tokens_B: Tensor) -> Tensor:
        return self.model.extend(tokens_B[:, None], self.cache)[:, 0]


def _unit(heads_BSHD: Tensor) -> Tensor:
    """Divide each head by its root mean square."""
    return F.rms_norm(heads_BSHD.float(), heads_BSHD.shape[-1:], eps=1e-6).to(heads_BSHD.dtype)


def _appended(past: Past, new: Past) -> Past:
    return [torch.cat(pair, dim=1) for pair in zip(past, new, strict=True)] if past else list(new)
