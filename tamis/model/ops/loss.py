"""Linear layer and cross-entropy in one, by chunks of rows: all logits never exist at once.

The gradient is formed in the same pass, while a chunk's logits are at hand; backward only scales it. One custom op, so
that a compiled model holds it as a single node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = {"cuda": 1 << 29, "cpu": 1 << 23}  # elements; small on a CPU, where the cache decides


def linear_cross_entropy(hidden_TE: Tensor, weight_VE: Tensor, targets_T: Tensor, vocab_size: int) -> Tensor:
    """Mean cross-entropy of `softmax(hidden @ weight[:vocab_size].T)` at the targets, in nats.

    Rows of the weight from `vocab_size` on are padding: they take no probability and get no gradient.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden_TE.requires_grad or weight_VE.requires_grad)
    loss, _, _ = _linear_cross_entropy(hidden_TE, weight_VE, targets_T, vocab_size, needs_gradient)
    return loss


@torch.library.custom_op("tamis::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, and the gradients of the summed loss (empty when not needed)."""
    cast = weight.to(hidden.dtype)
    d_hidden, d_weight = _gradients_like(hidden, weight, needs_gradient)
    total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
    rows = max(1, LOGITS_AT_ONCE.get(hidden.device.type, 1 << 23) // vocab_size)
    for start in range(0, hidden.shape[0], rows):
        part, target = hidden[start : start + rows], targets[start : start + rows]
        logits = part @ cast.T
        total += _cross_entropy_(logits, target, vocab_size, needs_gradient).to(total.dtype)
        if needs_gradient:  # the logits are now softmax minus target, not yet divided by the row count
            torch.mm(logits, cast, out=d_hidden[start : start + rows])
            _add_product_(d_weight, logits.T, part, is_first=start == 0)
    return total / hidden.shape[0], d_hidden, d_weight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=_wide(hidden), device=hidden.device)
    return loss, *_gradients_like(hidden, weight, needs_gradient)


def _gradients_like(hidden: Tensor, weight: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    if not needed:
        return hidden.new_empty(0), weight.new_empty(0)
    return torch.empty_like(hidden), torch.empty_like(weight, dtype=_wide(weight))


def _cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, write_gradient: bool) -> Tensor:
    """Summed loss of the rows; with `write_gradient` the logits become its gradient."""
    if logits.is_cuda:
        from tamis.model.ops.loss_kernel import cross_entropy_rows_

        return cross_entropy_rows_(logits, targets, vocab_size, write_gradient).sum()
    log_p = logits[:, :vocab_size].to(_wide(logits)).log_softmax(dim=-1)
    loss = -log_p.gather(1, targets[:, None]).sum()
    if write_gradient:
        p = log_p.exp_()
        p[torch.arange(len(targets)), targets] -= 1
        logits[:, :vocab_size] = p
        logits[:, vocab_size:] = 0
    return loss


def _add_product_(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """`total += a @ b`, at first without what `total` held. It is wide: rounded once, not once per chunk."""
    beta = 0 if is_first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # no processor multiplies narrow numbers into wide ones
        product = (a @ b).to(total.dtype)
        total.copy_(product) if is_first else total.add_(product)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.rows, ctx.weight_dtype = inputs[0].shape[0], inputs[1].dtype
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    d_hidden, d_weight = ctx.saved_tensors
    scale = d_loss / ctx.rows
    return d_hidden * scale.to(d_hidden.dtype), (d_weight * scale).to(ctx.weight_dtype), None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_keep)
