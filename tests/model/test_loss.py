"""Linear layer and cross-entropy by chunks, and the kernel alone, equal PyTorch in value and in every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tamis.model import loss
from tamis.model.loss import cross_entropy_rows_, linear_cross_entropy
from tests.attention.devices import DEVICE

# Rows, vocabulary, padded columns: a tile has 4,096 columns of four bytes, fewer if the row is short.
WHOLE_TILES_AND_RESTS = [(3, 257, 384), (2, 5000, 5120), (1, 7, 7), (2, 4096, 4096), (2, 4096, 4224), (2, 8195, 8320)]


def problem(rows: int, width: int, vocab: int, padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + vocab)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab + padding, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,), generator=generator)


def value_and_gradients(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [value, *torch.autograd.grad(value * 3, inputs)]  # times 3: the outer gradient must be carried through


@settings(max_examples=40)
@given(
    rows=st.integers(1, 20),
    vocab=st.integers(2, 30),
    padding=st.integers(0, 5),
    logits_at_once=st.sampled_from([1, 7, 50, 100, 1 << 23]),
)
def test_value_and_gradients_equal_the_plain_computation(
    rows: int, vocab: int, padding: int, logits_at_once: int
) -> None:
    hidden, weight, targets = problem(rows, 5, vocab, padding, torch.float64)
    plain = F.cross_entropy(hidden @ weight[:vocab].T, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss.LOGITS_AT_ONCE, "cpu", logits_at_once)
        chunked = linear_cross_entropy(hidden, weight, targets, vocab)
    got, expected = (value_and_gradients(value, hidden, weight) for value in (chunked, plain))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_all_logits_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    plain = loss._cross_entropy_

    def watched(logits: Tensor, *rest: object) -> Tensor:
        chunks.append(logits.numel())
        return plain(logits, *rest)

    monkeypatch.setattr(loss, "_cross_entropy_", watched)
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", 1000)
    hidden, weight, targets = problem(203, 4, 100, 0, torch.float32)
    linear_cross_entropy(hidden, weight, targets, 100).backward()
    assert max(chunks) <= 1000
    assert sum(chunks) == 203 * 100


def test_padding_takes_no_probability_and_gets_no_gradient() -> None:
    hidden, weight, targets = problem(9, 5, 11, 4, torch.float64)
    with torch.no_grad():
        weight[11:] = 1e6
    value = linear_cross_entropy(hidden, weight, targets, 11)
    torch.testing.assert_close(value, F.cross_entropy(hidden @ weight[:11].T, targets))
    value.backward()
    assert not weight.grad[11:].any()
    assert weight.grad[:11].any(dim=1).all()


def test_only_the_gradients_asked_for_are_made() -> None:
    hidden, weight, targets = problem(9, 5, 11, 0, torch.float64)
    linear_cross_entropy(hidden.detach(), weight, targets, 11).backward()
    linear_cross_entropy(hidden, weight.detach(), targets, 11).backward()
    plain = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), plain)
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), targets, 11).requires_grad


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_hidden_states_lose_little(weight_dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(300, 16, 50, 0, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = value_and_gradients(F.cross_entropy(exact[0] @ exact[1].T, targets), *exact)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    got = value_and_gradients(linear_cross_entropy(hidden, weight, targets, 50), hidden, weight)
    assert got[2].dtype == weight_dtype
    for ours, truth in zip(got, expected, strict=True):
        assert ((ours.double() - truth).norm() / truth.norm()).item() < 0.01


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_logits_stay_finite(scale: float) -> None:
    hidden, weight, targets = problem(9, 5, 11, 0, torch.float32)
    got = value_and_gradients(linear_cross_entropy(hidden * scale, weight, targets, 11), hidden, weight)
    expected = value_and_gradients(F.cross_entropy(hidden * scale @ weight.T, targets), hidden, weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("rows", "vocab", "padded"), WHOLE_TILES_AND_RESTS)
def test_the_kernel_equals_pytorch_and_padding_gets_no_gradient(rows: int, vocab: int, padded: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, padded, generator=generator) * 5).to(DEVICE)
    targets = torch.randint(vocab, (rows,), generator=generator).to(DEVICE)
    expected = logits[:, :vocab].clone().requires_grad_()
    wanted = F.cross_entropy(expected, targets, reduction="none")
    wanted.sum().backward()

    assert torch.allclose(cross_entropy_rows_(logits.clone(), targets, vocab, write_gradient=False), wanted, atol=1e-5)
    losses = cross_entropy_rows_(logits, targets, vocab, write_gradient=True)

    assert torch.allclose(losses, wanted, atol=1e-5)
    assert torch.allclose(logits[:, :vocab], expected.grad, atol=1e-6)
    assert (logits[:, vocab:] == 0).all()


@pytest.mark.parametrize(("rows", "vocab", "padded"), [(3, 257, 384), (2, 5000, 5120)])
def test_a_soft_cap_equals_pytorch_in_value_and_gradient(rows: int, vocab: int, padded: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, padded, generator=generator) * 20).to(DEVICE)
    targets = torch.randint(vocab, (rows,), generator=generator).to(DEVICE)
    expected = logits[:, :vocab].clone().requires_grad_()
    wanted = F.cross_entropy(15 * torch.tanh(expected / 15), targets, reduction="none")
    wanted.sum().backward()
    losses = cross_entropy_rows_(logits, targets, vocab, write_gradient=True, soft_cap=15.0)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :vocab], expected.grad, rtol=1e-4, atol=1e-6)
    assert (logits[:, vocab:] == 0).all()

    hidden, weight, targets = problem(9, 5, 11, 4, torch.float64)
    plain = F.cross_entropy(2 * torch.tanh(hidden @ weight[:11].T / 2), targets)
    fused = linear_cross_entropy(hidden, weight, targets, 11, soft_cap=2.0)
    got, expected_values = (value_and_gradients(value, hidden, weight) for value in (fused, plain))
    torch.testing.assert_close(got, expected_values, rtol=1e-12, atol=1e-13)


def test_padding_columns_do_not_count() -> None:
    logits = torch.randn(4, 384, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    targets = torch.tensor([0, 100, 255, 256], device=DEVICE)
    clean, dirty = logits.clone(), logits.clone()
    dirty[:, 257:] = torch.tensor([float("nan"), float("inf"), 1e38, -1e38], device=DEVICE)[:, None]
    losses = [cross_entropy_rows_(x, targets, 257, write_gradient=True) for x in (clean, dirty)]
    assert torch.equal(*losses) and torch.equal(clean, dirty)


def test_huge_logits_stay_finite_in_the_kernel() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0, 1.0]], device=DEVICE)
    losses = cross_entropy_rows_(logits, torch.tensor([1], device=DEVICE), 4, write_gradient=True)
    assert losses.item() == 6e4
    assert logits.isfinite().all()
