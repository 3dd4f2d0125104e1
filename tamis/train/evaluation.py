"""Validation loss on held-out documents: the same batches every time."""

from __future__ import annotations

import numpy as np
import torch

from tamis.train.distributed import Workers
from tamis.train.step import TrainStep


@torch.no_grad()
def validation_loss(step: TrainStep, batches: list[np.ndarray], workers: Workers) -> float | None:
    """Mean over all batches of all ranks, in nats per token; None when nothing is held out."""
    step.model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        loss, _ = step.loss(torch.from_numpy(batch).to(workers.device, torch.long))
        sums += torch.tensor([float(loss), 1.0], dtype=torch.float64)
    step.model.train()
    total, count = (sum(column) for column in zip(*workers.gather(sums.tolist()), strict=True))
    return total / count if count else None
