"""The processes of one run: who they are, how their gradients meet, and how they agree to stop.

Distribution is applied to the model from outside; with one process everything here is a no-op.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tamis.config import Config, ConfigError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Workers:
    """This process among its peers, as torchrun's variables say."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean_(self, x: Tensor) -> Tensor:
        """Average over the processes in place, on the device."""
        if self.world_size > 1:
            dist.all_reduce(x)
            x /= self.world_size
        return x

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank. Small Python objects only; it waits."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def join(config: Config) -> Iterator[Workers]:
    """Join the process group torchrun set up, if any, and leave it at the end."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(config, int(os.environ.get("LOCAL_RANK", 0)))
    if world_size > 1:
        dist.init_process_group(_process_backend(device, world_size), timeout=COLLECTIVE_TIMEOUT)
    try:
        yield Workers(rank, world_size, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(config: Config, local_rank: int) -> torch.device:
    wanted = config.runtime.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "runtime.device is cuda, but no usable GPU was found: check nvidia-smi, or set runtime.device=cpu"
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _process_backend(device: torch.device, world_size: int) -> str:
    if device.type == "cpu":
        return "gloo"
    # NCCL refuses two ranks on one GPU; gloo serves for trying things out there.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return "cpu:gloo,cuda:nccl" if local <= torch.cuda.device_count() else "gloo"


def distribute(model: nn.Module, config: Config, workers: Workers) -> nn.Module:
    """The model with its gradients averaged over all processes."""
    if workers.world_size == 1:
        return model
    runtime = config.runtime
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
        bucket_cap_mb=runtime.ddp_bucket_mb,
        static_graph=runtime.ddp_static_graph and not runtime.ddp_safe_mode,
        find_unused_parameters=runtime.ddp_find_unused,
        gradient_as_bucket_view=True,
    )
    if runtime.ddp_compress != "none" and not runtime.ddp_safe_mode:
        wrapped.register_comm_hook(None, _compression_hook(runtime.ddp_compress))
    return wrapped


def _compression_hook(kind: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook if kind == "bf16" else default_hooks.fp16_compress_hook


def synchronised_only_if(last: bool, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Gradients meet once per optimizer step: on its last micro-batch."""
    if last or not isinstance(model, nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()
