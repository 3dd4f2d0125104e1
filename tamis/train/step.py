"""One training step: micro-batches forward and backward, then the optimizer. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tamis.config import Config
from tamis.model import Decoder
from tamis.train.distributed import Workers, distribute, synchronised_only_if
from tamis.train.optimizer import Stepper
from tamis.train.profiling import marked

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class StepResult:
    """Of one optimizer step, still on the device."""

    loss: Tensor  # this rank's mean over its micro-batches, nats per token
    grad_norm: Tensor  # of the averaged gradient, before clipping
    gates: Tensor | None  # [layers, 5], see model.nsa.GATE_STATISTICS; None for the dense twin


class Loss(nn.Module):
    """The decoder as the function that is trained: tokens to loss, so that wrappers see one forward."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.decoder.loss(tokens_BS1)


class TrainStep:
    def __init__(self, decoder: Decoder, config: Config, workers: Workers) -> None:
        self.decoder, self.config, self.device = decoder, config, workers.device
        self.stepper = Stepper(decoder, config, workers.device)
        compiled = config.runtime.compile and workers.device.type == "cuda" and not config.runtime.ddp_safe_mode
        loss: nn.Module = Loss(decoder)
        self.model = distribute(loss, config, workers)
        self._call: Any = torch.compile(self.model) if compiled else self.model

    def loss(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        with autocast(self.config, self.device):
            return self._call(tokens_BS1)  # type: ignore[no-any-return]

    def __call__(self, tokens_ABS1: np.ndarray, number: int) -> StepResult:
        """Train on the micro-batches `[A, B, S+1]` as optimizer step `number`."""
        micro_batches = self._to_device(tokens_ABS1)
        losses, gates = [], None
        for index, tokens in enumerate(micro_batches):
            last = index + 1 == len(micro_batches)
            with synchronised_only_if(last, self.model):
                with marked("forward"):
                    loss, gates = self.loss(tokens)
                with marked("backward"):
                    self.stepper.backward(loss / len(micro_batches))
            losses.append(loss.detach())
        with marked("optimizer"):
            norm = self.stepper.step(number)
        return StepResult(torch.stack(losses).mean(), norm, gates)

    def _to_device(self, tokens_ABS1: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(tokens_ABS1)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True).long()


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Compute in the configured precision; the weights stay fp32."""
    dtype = COMPUTE_DTYPE[config.runtime.precision]
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
