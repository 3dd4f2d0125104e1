"""One training step: micro-batches forward and backward, then the optimizer. Nothing here waits for the device.

On one GPU, forward and backward of a micro-batch are a CUDA graph: a small batch is bound by launches, not arithmetic.
A large one is launched as it is: it gains nothing, and the runs before a capture take minutes at a million tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis.config import Config, Train
from tamis.data import stacked_offsets
from tamis.model import DTYPES, Decoder
from tamis.train.distributed import Ranks, distribute, is_sharded, synchronised_only_if
from tamis.train.guards import weights_differ
from tamis.train.metrics import Timestamp, forbids_update, pack_own, pack_step, seconds_between, timestamp
from tamis.train.optimizer import OptimizerStep
from tamis.train.selection import selection_statistics

GRAPH_UP_TO = 131072  # tokens of a micro-batch
GRAPH_WARM_UP = 3  # runs before a capture: compilation and the allocator must have settled

Outputs = tuple[Tensor, Tensor | None]  # detached loss and gate statistics of a micro-batch
ForwardBackward = Callable[[Tensor, Tensor | None], Outputs]  # of tokens, and the offsets of packed documents


class Loss(nn.Module):
    """The decoder from tokens to loss, as one forward that DDP and FSDP can wrap."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BS1: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.decoder.loss(tokens_BS1, cu_seqlens)


class TrainStep:
    """Forward, backward and update of the model on this rank; call it once per optimizer step."""

    def __init__(self, decoder: Decoder, config: Config, ranks: Ranks) -> None:
        self.decoder, self.config, self.ranks, self.device = decoder, config, ranks, ranks.device
        on_gpu = ranks.device.type == "cuda"
        if config.runtime.compile and on_gpu and not config.runtime.ddp_safe_mode:
            decoder.compile_blocks()
        self.model = distribute(Loss(decoder), config, ranks)
        self.optimizer = OptimizerStep(decoder, config, ranks.device)  # after FSDP has replaced the parameters
        self._forwards: list[tuple[Timestamp, Timestamp]] = []  # of the current step, one per micro-batch
        self._graph: GraphedMicroBatch | None = None
        self._offsets_size = 0
        if replays_graph(config, ranks):
            self.optimizer.keep_gradients = True
            self._graph = GraphedMicroBatch(self._forward_backward, decoder.parameters())

    def loss(self, tokens_BS1: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        with attention_kernels(self.config), autocast(self.config, self.device):
            return self.model(tokens_BS1, cu_seqlens)  # type: ignore[no-any-return]

    def __call__(
        self,
        tokens_ABS1: np.ndarray | None,
        number: int,
        flags: Sequence[bool] = (),
        offsets_AN: np.ndarray | None = None,
    ) -> Tensor:
        """Train on the micro-batches `[A, B, S+1]` as optimizer step `number`; returns its packed metrics.

        A rank without data (None) still takes part, so that the others do not wait for it; then no rank updates.
        `offsets_AN` are the loader's offsets of packed documents; without them they are found in the tokens.
        """
        micro_batches = self._no_tokens() if tokens_ABS1 is None else tokens_ABS1
        offsets = self._offsets(micro_batches, offsets_AN)
        losses, gates = [], []
        for index, inputs in enumerate(zip(self._to_device(micro_batches).long(), offsets, strict=True)):
            with synchronised_only_if(index + 1 == len(micro_batches), self.model):
                graph = self._graph
                loss, of_gates = self._forward_backward(*inputs) if graph is None else graph(*inputs, index == 0)
            losses.append(loss)
            gates += [] if of_gates is None else [of_gates]
        own = pack_own(_mean(losses), tokens_ABS1 is None, flags, _mean(gates) if gates else None)
        averaged = self.ranks.mean_(own)
        with torch.profiler.record_function("optimizer"):
            norm = self.optimizer.step(number, veto=forbids_update(averaged))
        return pack_step(averaged, norm, self._weights_differ(number))

    @torch.no_grad()
    def validation_loss(self, batches: list[np.ndarray]) -> float | None:
        """Return the mean over all batches of all ranks, in nats per token; None when nothing is held out."""
        offsets = self.ranks.together(lambda: [self._offsets(batch[None])[0] for batch in batches])
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for batch, cu_seqlens in zip(batches, offsets, strict=True):
            loss, _ = self.loss(torch.from_numpy(batch).to(self.device, torch.long), cu_seqlens)
            sums += torch.tensor([float(loss), 1.0], dtype=torch.float64)
        self.model.train()
        total, count = (sum(column) for column in zip(*self.ranks.gather(sums.tolist()), strict=True))
        return total / count if count else None

    def selection_statistics(self, tokens_ABS1: np.ndarray) -> Tensor:
        """Measure which blocks each NSA layer selects in the first sequence of a batch, `[layers, 3]`.

        Where training packs documents, the figures are those of the longest document in that sequence.
        """
        tokens_1S = self._to_device(tokens_ABS1[0, :1, :-1].copy()).long()
        (cu_seqlens,) = self._offsets(tokens_ABS1[:1, :1])
        with autocast(self.config, self.device):
            return selection_statistics(self.decoder, tokens_1S, cu_seqlens)

    def forward_seconds(self) -> Callable[[], float | None]:
        """Return a function that gives the time of the last step's forward passes, once that step has finished."""
        spans, self._forwards = self._forwards, []
        return lambda: sum(seconds_between(*span) for span in spans) if spans else None

    def _weights_differ(self, number: int) -> Tensor:
        every = self.config.runtime.weight_check_every
        is_due = every > 0 and number % every == 0 and not is_sharded(self.config, self.ranks)  # shards are no copies
        return weights_differ(self.decoder, self.ranks) if is_due else torch.zeros((), device=self.device)

    def _no_tokens(self) -> np.ndarray:
        train = self.config.train
        return np.zeros((train.accumulate_grad_batches, train.batch_size, train.seq_len + 1), np.int32)

    def _offsets(self, tokens_ABS1: np.ndarray, offsets_AN: np.ndarray | None = None) -> list[Tensor] | list[None]:
        """Return each micro-batch's offsets of documents on the device; None if attention crosses documents."""
        if self.config.data.packing == "stream":
            return [None] * len(tokens_ABS1)
        if offsets_AN is None:
            offsets_AN = stacked_offsets(tokens_ABS1, self.config.vocab_size - 1)
        # Never shrinks: each size costs a capture and a compilation. Empty documents change no bit of the result.
        self._offsets_size = max(self._offsets_size, offsets_AN.shape[1])
        offsets_AN = np.pad(offsets_AN, ((0, 0), (0, self._offsets_size - offsets_AN.shape[1])), mode="edge")
        return list(self._to_device(offsets_AN))

    def _forward_backward(self, tokens_BS1: Tensor, cu_seqlens: Tensor | None = None) -> Outputs:
        began = None if self._graph else timestamp(self.device)  # a replayed graph cannot be timed inside
        with torch.profiler.record_function("forward"):
            loss, gates = self.loss(tokens_BS1, cu_seqlens)
        if began is not None:
            self._forwards.append((began, timestamp(self.device)))
        with torch.profiler.record_function("backward"):
            self.optimizer.backward(loss / self.config.train.accumulate_grad_batches)
        return loss.detach(), gates

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def replays_graph(config: Config, ranks: Ranks) -> bool:
    """Whether a micro-batch is a CUDA graph. Graph replay emits no NVTX ranges, so graphs are off when NVTX is on."""
    runtime, tokens = config.runtime, config.train.batch_size * config.train.seq_len
    allowed = runtime.cuda_graph and not runtime.nvtx and tokens <= GRAPH_UP_TO
    return allowed and ranks.device.type == "cuda" and ranks.world_size == 1


class GraphedMicroBatch:
    """Capture `work` as a CUDA graph on first use, and again when a step has other shapes; replay it otherwise.

    Gradients live in fixed buffers. A step's first micro-batch writes them and the others add to them: two graphs,
    since a graph always does the same. Nothing is zeroed, and a step of one micro-batch never adds.
    """

    def __init__(self, work: ForwardBackward, parameters: Iterable[nn.Parameter]) -> None:
        self._work, self._parameters = work, list(parameters)
        self._captured: dict[bool, tuple[torch.cuda.CUDAGraph, Outputs]] = {}

    def __call__(self, tokens_BS1: Tensor, cu_seqlens: Tensor | None, is_first: bool) -> Outputs:
        """Replay. `is_first` of its step: gradients are written, not added to. The very first call must set it."""
        if not self._captured or self._shapes != _shapes(tokens_BS1, cu_seqlens):
            if self._captured:  # the next length of train.length_schedule, or more documents than before
                torch.cuda.synchronize()
                self._captured.clear()
            self._warm_up(tokens_BS1, cu_seqlens)
        if is_first not in self._captured:
            self._captured[is_first] = self._capture()
        graph, (loss, gates) = self._captured[is_first]
        self._tokens.copy_(tokens_BS1)
        if self._cu_seqlens is not None and cu_seqlens is not None:
            self._cu_seqlens.copy_(cu_seqlens)
        graph.replay()
        return loss.clone(), None if gates is None else gates.clone()  # the next replay overwrites them

    def _warm_up(self, tokens_BS1: Tensor, cu_seqlens: Tensor | None) -> None:
        self._tokens, self._cu_seqlens = tokens_BS1.clone(), None if cu_seqlens is None else cu_seqlens.clone()
        self._shapes = _shapes(tokens_BS1, cu_seqlens)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARM_UP):
                self._work(self._tokens, self._cu_seqlens)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in self._parameters:
            parameter.grad = None  # without a gradient to add to, the capture that follows makes the buffers

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        graph = torch.cuda.CUDAGraph()
        shared = next((other.pool() for other, _ in self._captured.values()), None)  # they never run at once
        with torch.cuda.graph(graph, pool=shared):
            return graph, self._work(self._tokens, self._cu_seqlens)


def _shapes(*tensors: Tensor | None) -> tuple[torch.Size | None, ...]:
    return tuple(None if tensor is None else tensor.shape for tensor in tensors)


def length_of_step(number: int, train: Train) -> int:
    """Return the tokens per sequence of optimizer step `number`, from 1, by `train.length_schedule`.

    The schedule has at most six lengths, because each is compiled for itself.
    """
    lengths = train.length_schedule or [train.seq_len]
    return lengths[(number - 1) * len(lengths) // train.steps]


def _mean(of_micro_batches: list[Tensor]) -> Tensor:
    """Average over micro-batches. They have one size, so the mean of their means is the mean of all tokens."""
    return torch.stack(of_micro_batches).mean(dim=0)


def attention_kernels(config: Config) -> contextlib.AbstractContextManager[Any]:
    """Select the PyTorch attention kernels that the dense twin may use, fastest first."""
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
    dtype = DTYPES[config.runtime.precision]
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
