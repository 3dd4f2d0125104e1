"""The dense twin's attention: gradients put together from pieces are those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tamis.model import dense_attention

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def tensors(batch: int, tokens: int, heads: int, groups: int, dim: int, **kind: object) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    torch.manual_seed(tokens)
    return [torch.randn(batch, tokens, n, dim, **kind) for n in (heads, groups, groups, heads)]  # type: ignore[arg-type]


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, may_use_cudnn: bool) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(dense_attention.causal_attention(*leaves, may_use_cudnn), leaves, dout)


def log_sum_exps(q: Tensor, k: Tensor) -> Tensor:
    scores = _scores(q, k, is_causal=True)
    return scores.logsumexp(-1, keepdim=True)


def plain_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool) -> list:
    """What cuDNN is asked for, written out: every tensor `[B,S,H,D]`, rows' log-sum-exps `[B,H,S,1]`."""
    repeats, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    p = (_scores(q, k, is_causal) - lse).exp()
    dout, out, q, k, v = (t.transpose(1, 2) for t in (dout, out, q, k, v))
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = (t.unflatten(1, (-1, repeats)).sum(2) for t in (ds.mT @ q, p.mT @ dout))
    return [t.transpose(1, 2) for t in (ds @ k, dk, dv)]


def _scores(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")) if is_causal else scores


@pytest.mark.parametrize(("batch", "tokens"), [(2, 64), (1, 40), (3, 36), (1, 7)])
def test_triangles_and_squares_give_the_gradients_of_the_whole(
    batch: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_attention, "WHOLE", 8)
    q, k, v, dout = tensors(batch, tokens, 6, 2, 4, dtype=torch.float64)
    out = dense_attention.causal_attention(q, k, v, True).contiguous()
    pieces = dense_attention.gradients_by_halves(dout, q, k, v, out, log_sum_exps(q, k), plain_backward)
    torch.testing.assert_close(pieces, gradients(q, k, v, dout, True))


@pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4096), (3, 1500)])
def test_on_a_gpu_the_pieces_agree_with_float64(batch: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_attention, "WHOLE", 512)
    half = tensors(batch, tokens, 12, 2, 64, dtype=torch.bfloat16, device="cuda")
    assert dense_attention._gains_by_halves(half[0])
    expected = gradients(*(t.double() for t in half), may_use_cudnn=False)
    for got, want in zip(gradients(*half, may_use_cudnn=True), expected, strict=True):
        assert float((got - want).norm() / want.norm()) < 5e-3
