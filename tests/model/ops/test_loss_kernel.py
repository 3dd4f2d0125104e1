"""The Triton cross-entropy against PyTorch's, in the interpreter without a GPU and on it where there is one."""

import pytest
import torch

from tamis.model.ops.loss_kernel import cross_entropy_rows_
from tests.attention.devices import DEVICE

# Rows, columns that count, columns: tiles are of 4,096 columns of four bytes, and fewer where a row is short.
WHOLE_TILES_AND_RESTS = [(3, 257, 384), (2, 5000, 5120), (1, 7, 7), (2, 4096, 4096), (2, 4096, 4224), (2, 8195, 8320)]


@pytest.mark.parametrize(("rows", "vocab", "padded"), WHOLE_TILES_AND_RESTS)
def test_loss_and_gradient_equal_pytorchs_and_padding_gets_none(rows: int, vocab: int, padded: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, padded, generator=generator) * 5).to(DEVICE)
    targets = torch.randint(vocab, (rows,), generator=generator).to(DEVICE)
    expected = logits[:, :vocab].clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(expected, targets, reduction="none")
    loss.sum().backward()

    assert torch.allclose(cross_entropy_rows_(logits.clone(), targets, vocab, write_gradient=False), loss, atol=1e-5)
    losses = cross_entropy_rows_(logits, targets, vocab, write_gradient=True)

    assert torch.allclose(losses, loss, atol=1e-5)
    assert torch.allclose(logits[:, :vocab], expected.grad, atol=1e-6)
    assert (logits[:, vocab:] == 0).all()


def test_what_lies_in_the_padding_does_not_count() -> None:
    logits = torch.randn(4, 384, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    targets = torch.tensor([0, 100, 255, 256], device=DEVICE)
    clean, soiled = logits.clone(), logits.clone()
    soiled[:, 257:] = torch.tensor([float("nan"), float("inf"), 1e38, -1e38], device=DEVICE)[:, None]
    losses = [cross_entropy_rows_(x, targets, 257, write_gradient=True) for x in (clean, soiled)]
    assert torch.equal(*losses) and torch.equal(clean, soiled)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0, 1.0]], device=DEVICE)
    losses = cross_entropy_rows_(logits, torch.tensor([1], device=DEVICE), 4, write_gradient=True)
    assert losses.item() == 6e4
    assert logits.isfinite().all()
