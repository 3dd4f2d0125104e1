"""One training step: micro-batches forward and backward, then the optimizer. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis.config import Config
from tamis.model import Decoder
from tamis.train.distributed import Workers, distribute, synchronised_only_if
from tamis.train.graph import GraphedMicroBatch
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
        self.model = distribute(Loss(decoder), config, workers)
        on_gpu, plain = workers.device.type == "cuda", config.runtime.ddp_safe_mode
        self._call: Any = torch.compile(self.model) if config.runtime.compile and on_gpu and not plain else self.model
        self._graph: GraphedMicroBatch | None = None
        if config.runtime.cuda_graph and on_gpu and workers.world_size == 1:
            self.stepper.keep_gradients = True
            self._graph = GraphedMicroBatch(self._forward_backward, decoder.parameters())

    def loss(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        with attention_kernels(self.config), autocast(self.config, self.device):
            return self._call(tokens_BS1)  # type: ignore[no-any-return]

    def __call__(self, tokens_ABS1: np.ndarray, number: int) -> StepResult:
        """Train on the micro-batches `[A, B, S+1]` as optimizer step `number`."""
        micro_batches = self._to_device(tokens_ABS1)
        losses, gates = [], None
        for index, tokens in enumerate(micro_batches):
            with synchronised_only_if(index + 1 == len(micro_batches), self.model):
                loss, gates = (self._graph or self._forward_backward)(tokens)
            losses.append(loss)
        with marked("optimizer"):
            norm = self.stepper.step(number)
        return StepResult(torch.stack(losses).mean(), norm, gates)

    def _forward_backward(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        with marked("forward"):
            loss, gates = self.loss(tokens_BS1)
        with marked("backward"):
            self.stepper.backward(loss / self.config.train.accumulate_grad_batches)
        return loss.detach(), gates

    def _to_device(self, tokens_ABS1: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(tokens_ABS1)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True).long()


def attention_kernels(config: Config) -> contextlib.AbstractContextManager[Any]:
    """Which of PyTorch's attention kernels the dense twin may use, the fastest first."""
    flash = [SDPBackend.FLASH_ATTENTION]
    rest = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if config.runtime.sdpa == "flash_only":
        return sdpa_kernel(flash)
    if config.runtime.sdpa == "no_flash" or not config.runtime.use_flash:
        return sdpa_kernel(rest, set_priority=True)
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *flash, *rest], set_priority=True)


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Compute in the configured precision; the weights stay fp32."""
    dtype = COMPUTE_DTYPE[config.runtime.precision]
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
