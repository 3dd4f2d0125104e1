"""Linear layer and cross-entropy in one op, by chunks of rows, so that the full logits never exist in memory.

The gradient is formed in the same pass, from each chunk's logits; backward only scales it. It is one custom op, so that
a compiled model holds it as a single node.

The Triton kernel reads a row twice, the second time from cache: once for its log-sum-exp, once to replace it by softmax
minus target. Few rows are in flight at once and many warps share one, so that the row is still in cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OP = "tamis::linear_cross_entropy"
LOGITS_AT_ONCE = {"cuda": 1 << 29, "cpu": 1 << 23}  # elements; small on a CPU, where the cache decides
MAX_WARPS = 32  # two programs fill a multiprocessor: 27 MB of logits in flight on an H200, half its cache
WIDEST_LOAD = 16  # bytes


def linear_cross_entropy(
    hidden_TE: Tensor, weight_VE: Tensor, targets_T: Tensor, vocab_size: int, soft_cap: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of `softmax(hidden @ weight[:vocab_size].T)` at the targets, in nats.

    Rows of the weight from `vocab_size` on are padding: they take no probability and get no gradient. A `soft_cap`
    above 0 limits the logits first, as the function `soft_capped` does.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden_TE.requires_grad or weight_VE.requires_grad)
    loss, _, _ = torch.ops.tamis.linear_cross_entropy(
        hidden_TE, weight_VE, targets_T, vocab_size, needs_gradient, soft_cap
    )
    return loss


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return `cap · tanh(logits / cap)`, which stays between −cap and cap; a cap of 0 changes nothing."""
    return cap * torch.tanh(logits / cap) if cap else logits


# Not as torch.library.custom_op: its first call loads the compiler, which takes 1.6 s where nothing is compiled.
torch.library.define(
    OP,
    "(Tensor hidden, Tensor weight, Tensor targets, int vocab_size, bool needs_gradient, float soft_cap)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(OP, "default")
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, needs_gradient: bool, soft_cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss and the gradients of the summed loss (empty when not needed)."""
    cast = weight.to(hidden.dtype)
    d_hidden, d_weight = _gradients_like(hidden, weight, needs_gradient)
    total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
    rows = max(1, LOGITS_AT_ONCE.get(hidden.device.type, 1 << 23) // vocab_size)
    for start in range(0, hidden.shape[0], rows):
        part, target = hidden[start : start + rows], targets[start : start + rows]
        logits = part @ cast.T
        total += _cross_entropy_(logits, target, vocab_size, needs_gradient, soft_cap).to(total.dtype)
        if needs_gradient:  # the logits are now their gradient, not yet divided by the row count
            torch.mm(logits, cast, out=d_hidden[start : start + rows])
            _add_product_(d_weight, logits.T, part, is_first=start == 0)
    return total / hidden.shape[0], d_hidden, d_weight


@torch.library.register_fake(OP)
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, needs_gradient: bool, soft_cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=_wide(hidden), device=hidden.device)
    return loss, *_gradients_like(hidden, weight, needs_gradient)


def _gradients_like(hidden: Tensor, weight: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    if not needed:
        return hidden.new_empty(0), weight.new_empty(0)
    return torch.empty_like(hidden), torch.empty_like(weight, dtype=_wide(weight))


def _cross_entropy_(
    logits: Tensor, targets: Tensor, vocab_size: int, write_gradient: bool, soft_cap: float = 0.0
) -> Tensor:
    """Return the summed loss of the rows; with `write_gradient`, overwrite the logits with its gradient."""
    if logits.is_cuda:
        return cross_entropy_rows_(logits, targets, vocab_size, write_gradient, soft_cap).sum()
    capped = soft_capped(logits[:, :vocab_size].to(_wide(logits)), soft_cap)
    log_p = capped.log_softmax(dim=-1)
    loss = -log_p.gather(1, targets[:, None]).sum()
    if write_gradient:
        p = log_p.exp_()
        p[torch.arange(len(targets)), targets] -= 1
        if soft_cap:
            p *= 1 - (capped / soft_cap) ** 2
        logits[:, :vocab_size] = p
        logits[:, vocab_size:] = 0
    return loss


def _add_product_(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add `a @ b` to `total`, or overwrite it the first time. `total` is float32: it is rounded once, not per chunk."""
    beta = 0 if is_first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # no CPU product takes half precision and returns float32
        product = (a @ b).to(total.dtype)
        total.copy_(product) if is_first else total.add_(product)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.rows, ctx.weight_dtype = inputs[0].shape[0], inputs[1].dtype
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_hidden, d_weight = ctx.saved_tensors
    scale = d_loss / ctx.rows
    return d_hidden * scale.to(d_hidden.dtype), (d_weight * scale).to(ctx.weight_dtype), None, None, None, None


torch.library.register_autograd(OP, _backward, setup_context=_setup_context)


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    row_stride,
    vocab,
    padded,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    TILE: tl.constexpr = LANES * VECTOR
    columns = (tl.arange(0, LANES) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows × vocabulary exceeds 2^31
    base = logits + row * row_stride
    target = tl.load(targets + row).to(tl.int32)
    of_target = _capped(tl.load(base + target).to(tl.float32), SOFT_CAP)
    # Whole tiles take no mask: with a mask, one load of 16 bytes becomes eight of two.
    whole = vocab // TILE * TILE
    largest = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)  # one per lane, as `largest`; lanes are combined once, at the end of the row
    for start in range(0, whole, TILE):
        x = _capped(tl.load(base + start + columns).to(tl.float32), SOFT_CAP)
        largest, total = _add_tile(x, largest, total)
    if whole < vocab:
        x = _load_last(base, whole + columns, vocab, padded, SOFT_CAP)
        largest, total = _add_tile(x, largest, total)
    largest_of_all = tl.max(largest, 0)
    log_sum = largest_of_all + tl.log(tl.sum(total * _exp(largest - largest_of_all), 0))
    tl.store(losses + row, log_sum - of_target)
    if WRITE_GRADIENT:
        tl.debug_barrier()  # the target's logit is read before another warp overwrites it
        for start in range(0, whole, TILE):
            column = start + columns
            x = _capped(tl.load(base + column).to(tl.float32), SOFT_CAP)
            gradient = _gradient(x, log_sum, column == target, SOFT_CAP)
            tl.store(base + column, gradient.to(logits.dtype.element_ty))
        for start in range(whole, padded, TILE):
            column = start + columns
            x = _load_last(base, column, vocab, padded, SOFT_CAP)
            gradient = _gradient(x, log_sum, column == target, SOFT_CAP)
            tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=column < padded)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """Compute `exp` by `exp2`: `tl.exp` takes three more instructions to keep results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _capped(x, SOFT_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Limit logits to ±SOFT_CAP by a hyperbolic tangent; a cap of 0 changes nothing."""
    if SOFT_CAP > 0:
        x = SOFT_CAP * (1.0 - 2.0 / (1.0 + _exp(x * (2.0 / SOFT_CAP))))
    return x


@triton.jit
def _gradient(x, log_sum, is_target, SOFT_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return softmax minus target, times the slope of the cap at the capped logits `x`."""
    gradient = _exp(x - log_sum) - tl.where(is_target, 1.0, 0.0)
    if SOFT_CAP > 0:
        share = tl.where(x == -float("inf"), 0.0, x / SOFT_CAP)  # −inf: padding, whose gradient is 0
        gradient *= 1.0 - share * share
    return gradient


@triton.jit
def _add_tile(x, largest, total):  # type: ignore[no-untyped-def]
    """Update each lane's largest value and its sum of exponentials relative to that value."""
    new_largest = tl.maximum(largest, tl.max(x, 1))
    reached = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # −inf: this lane holds no column of a short row
    return new_largest, total * _exp(largest - reached) + tl.sum(_exp(x - reached[:, None]), 1)


@triton.jit
def _load_last(base, column, vocab, padded, SOFT_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the end of a row; padding columns count as minus infinity."""
    x = tl.load(base + column, mask=column < padded, other=0.0).to(tl.float32)
    return tl.where(column < vocab, _capped(x, SOFT_CAP), -float("inf"))


def cross_entropy_rows_(
    logits_TV: Tensor, targets_T: Tensor, vocab_size: int, write_gradient: bool, soft_cap: float = 0.0
) -> Tensor:
    """Return each row's loss in float32; columns from `vocab_size` on are padding. The gradient is written in place."""
    rows, padded = logits_TV.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
    vector = WIDEST_LOAD // logits_TV.element_size()
    warps = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(padded, 32 * vector)))
    _cross_entropy_kernel[(rows,)](
        logits_TV,
        targets_T,
        losses,
        logits_TV.stride(0),
        vocab_size,
        padded,
        LANES=32 * warps,
        VECTOR=vector,
        WRITE_GRADIENT=write_gradient,
        SOFT_CAP=soft_cap,
        num_warps=warps,
    )
    return losses
