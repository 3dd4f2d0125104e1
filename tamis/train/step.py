"""One training step: micro-batches forward and backward, then the optimizer. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis.attention.ranges import marked
from tamis.config import Config
from tamis.model import Decoder
from tamis.train import metrics as step_numbers
from tamis.train.agreement import weights_differ
from tamis.train.clock import Mark, mark, seconds_between
from tamis.train.distributed import Workers, distribute, is_sharded, synchronised_only_if
from tamis.train.graph import GraphedMicroBatch
from tamis.train.optimizer import Stepper

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Loss(nn.Module):
    """The decoder as the function that is trained: tokens to loss, so that wrappers see one forward."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.decoder.loss(tokens_BS1)


class TrainStep:
    def __init__(self, decoder: Decoder, config: Config, workers: Workers) -> None:
        self.decoder, self.config, self.workers, self.device = decoder, config, workers, workers.device
        on_gpu = workers.device.type == "cuda"
        if config.runtime.compile and on_gpu and not config.runtime.ddp_safe_mode:
            decoder.compile_blocks()
        self.model = distribute(Loss(decoder), config, workers)
        self.stepper = Stepper(decoder, config, workers.device)  # after FSDP has replaced the parameters
        self._forwards: list[tuple[Mark, Mark]] = []  # of the step under way, one per micro-batch
        self._graph: GraphedMicroBatch | None = None
        # A replayed graph does not come by the ranges that a profiler was promised.
        if config.runtime.cuda_graph and on_gpu and workers.world_size == 1 and not config.runtime.nvtx:
            self.stepper.keep_gradients = True
            self._graph = GraphedMicroBatch(self._forward_backward, decoder.parameters())

    def loss(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        with attention_kernels(self.config), autocast(self.config, self.device):
            return self.model(tokens_BS1)  # type: ignore[no-any-return]

    def __call__(self, tokens_ABS1: np.ndarray | None, number: int, flags: Sequence[bool] = ()) -> Tensor:
        """Train on the micro-batches `[A, B, S+1]` as optimizer step `number`; returns its `step_numbers`.

        A rank without data (None) takes part all the same, so that nobody waits for it; then no rank updates.
        """
        micro_batches = self._to_device(self._no_tokens() if tokens_ABS1 is None else tokens_ABS1)
        losses, gates = [], []
        for index, tokens in enumerate(micro_batches):
            with synchronised_only_if(index + 1 == len(micro_batches), self.model):
                graph = self._graph
                loss, of_gates = self._forward_backward(tokens) if graph is None else graph(tokens, index == 0)
            losses.append(loss)
            gates += [] if of_gates is None else [of_gates]
        own = step_numbers.own_part(_mean(losses), tokens_ABS1 is None, flags, _mean(gates) if gates else None)
        averaged = self.workers.mean_(own)
        with marked("optimizer"):
            norm = self.stepper.step(number, veto=step_numbers.forbids_update(averaged))
        return step_numbers.whole(averaged, norm, self._weights_differ(number))

    def forward_seconds(self) -> Callable[[], float | None]:
        """How long the forward passes of the last step took, to be asked once the step has finished."""
        spans, self._forwards = self._forwards, []
        return lambda: sum(seconds_between(*span) for span in spans) if spans else None

    def _weights_differ(self, number: int) -> Tensor:
        every = self.config.runtime.weight_check_every
        is_due = every > 0 and number % every == 0 and not is_sharded(self.config, self.workers)  # shards are no copies
        return weights_differ(self.decoder, self.workers) if is_due else torch.zeros((), device=self.device)

    def _no_tokens(self) -> np.ndarray:
        train = self.config.train
        return np.zeros((train.accumulate_grad_batches, train.batch_size, train.seq_len + 1), np.int32)

    def _forward_backward(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor | None]:
        began = None if self._graph else mark(self.device)  # a graph's inside cannot be timed
        with marked("forward"):
            loss, gates = self.loss(tokens_BS1)
        if began is not None:
            self._forwards.append((began, mark(self.device)))
        with marked("backward"):
            self.stepper.backward(loss / self.config.train.accumulate_grad_batches)
        return loss.detach(), gates

    def _to_device(self, tokens_ABS1: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(tokens_ABS1)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True).long()


def _mean(of_micro_batches: list[Tensor]) -> Tensor:
    """Over a step's micro-batches; they are of one size, so a mean of their means is the mean of all tokens."""
    return torch.stack(of_micro_batches).mean(dim=0)


def attention_kernels(config: Config) -> contextlib.AbstractContextManager[Any]:
    """Which of PyTorch's attention kernels the dense twin may use, the fastest first."""
    flash = [SDPBackend.FLASH_ATTENTION]
    rest = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if config.runtime.sdpa == "flash_only":
        return sdpa_kernel(flash)
    if config.runtime.sdpa == "no_flash" or not config.runtime.use_flash:
        return sdpa_kernel(rest, set_priority=True)
    cudnn = [SDPBackend.CUDNN_ATTENTION] if config.runtime.may_use_cudnn else []
    return sdpa_kernel([*cudnn, *flash, *rest], set_priority=True)


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Compute in the configured precision; the weights stay fp32."""
    dtype = COMPUTE_DTYPE[config.runtime.precision]
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
