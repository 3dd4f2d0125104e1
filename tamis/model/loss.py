"""Linear layer and cross-entropy in one, by chunks of rows: all logits never exist at once.

The gradient is formed in the same pass, while a chunk's logits are at hand; backward only scales it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = {"cuda": 1 << 27, "cpu": 1 << 23}  # elements; small on a CPU, where the cache decides


def linear_cross_entropy(hidden_TE: Tensor, weight_VE: Tensor, targets_T: Tensor, vocab_size: int) -> Tensor:
    """Mean cross-entropy of `softmax(hidden @ weight[:vocab_size].T)` at the targets.

    Rows of the weight from `vocab_size` on are padding: they take no probability and get no gradient.
    """
    return _LinearCrossEntropy.apply(hidden_TE, weight_VE, targets_T, vocab_size)  # type: ignore[no-untyped-call,no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        real = weight[:vocab_size].to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=_wide(weight)) if needs_weight else None
        total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        rows = max(1, LOGITS_AT_ONCE.get(hidden.device.type, 1 << 23) // vocab_size)
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], targets[start : start + rows, None]
            logits = (part @ real.T).to(total.dtype)
            log_p = logits.log_softmax(dim=-1)
            total -= log_p.gather(1, target).sum()
            if d_hidden is None and d_weight is None:
                continue
            # Not yet divided by the row count: in half precision the small ones would vanish.
            d_logits = log_p.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=total.dtype))
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[start : start + rows] = d_logits @ real
            if d_weight is not None:
                d_weight[:vocab_size] += (d_logits.T @ part).to(d_weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.rows = hidden.shape[0]
        return total / ctx.rows

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        d_hidden, d_weight = (None if d is None else (d * (d_loss / ctx.rows)).to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden, d_weight, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
