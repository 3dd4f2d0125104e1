"""Sampling for rows with different settings, in one pass over the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.generate.sample import Sampling, choose


def choose_each(logits_BV: Tensor, uniform_B: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the next token of each row, as `choose` does for rows of one setting."""
    tokens_B = torch.empty(len(samplings), dtype=torch.long, device=logits_BV.device)
    for sampling in dict.fromkeys(_without_seed(one) for one in samplings):
        rows = [row for row, one in enumerate(samplings) if _without_seed(one) == sampling]
        tokens_B[rows] = choose(logits_BV[rows], uniform_B[rows], sampling)
    return tokens_B


def _without_seed(sampling: Sampling) -> Sampling:
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p)
