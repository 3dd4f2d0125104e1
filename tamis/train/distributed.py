"""The processes of one run: who they are, how they exchange facts, and how their gradients meet.

Distribution is applied to the model from outside; with one process everything here is a no-op.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
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
        """`value` of every rank, in rank order, on every rank: small things that JSON can hold. It waits."""
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, nn.functional.pad(own, (0, longest - len(own))))
        return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths, strict=True)]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def leave_at_once(self, code: int) -> None:
        """End a process that failed, if it has peers: they may be gone, or stuck where it will never join them.

        Both leaving the group in order and Python's own way out wait for every collective under way.
        """
        if self.world_size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextlib.contextmanager
def join(config: Config) -> Iterator[Workers]:
    """Join the process group torchrun set up, if any, and leave it at the end."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(config, int(os.environ.get("LOCAL_RANK", 0)))
    if world_size > 1:
        dist.init_process_group(_process_backend(device, world_size), timeout=COLLECTIVE_TIMEOUT)
    yield Workers(rank, world_size, device)
    # Not after an error: leaving in order may wait for a peer that is no longer there.
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def _process_backend(device: torch.device, world_size: int) -> str:
    if device.type == "cpu":
        return "gloo"
    # NCCL refuses two ranks on one GPU; gloo serves for trying things out there.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return "cpu:gloo,cuda:nccl" if local <= torch.cuda.device_count() else "gloo"


def model_config(config: Config, workers: Workers) -> Config:
    """The configuration to build the model from: several processes checkpoint activations only if told to twice."""
    runtime = config.runtime
    if workers.world_size == 1 or not (runtime.gradient_checkpointing and runtime.ddp_disable_gc):
        return config
    return config.model_copy(update={"runtime": runtime.model_copy(update={"gradient_checkpointing": False})})


def is_sharded(config: Config, workers: Workers) -> bool:
    """Whether parameters and optimizer state are divided among the processes."""
    return workers.world_size > 1 and config.runtime.parallel == "fsdp"


def distribute(model: nn.Module, config: Config, workers: Workers) -> nn.Module:
    """The model with its gradients averaged over all processes, and with `fsdp` its parameters divided among them."""
    if is_sharded(config, workers):
        from tamis.train.fsdp import shard

        return shard(model, config, workers.device)
    return model if workers.world_size == 1 else _replicate(model, config, workers)


def _replicate(model: nn.Module, config: Config, workers: Workers) -> nn.Module:
    runtime = config.runtime
    # PyTorch's static graph does not know backward passes that are not synchronised: its first one fails an assertion.
    is_static = runtime.ddp_static_graph and not runtime.ddp_safe_mode and config.train.accumulate_grad_batches == 1
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
        bucket_cap_mb=runtime.ddp_bucket_mb,
        static_graph=is_static,
        find_unused_parameters=runtime.ddp_find_unused,
        gradient_as_bucket_view=True,
    )
    if runtime.ddp_compress != "none" and not runtime.ddp_safe_mode:
        compress = _compression_hook(runtime.ddp_compress)
        # In a lambda: DDP refuses torch's bf16 hook by its name without NCCL, though gloo carries bf16 as well.
        wrapped.register_comm_hook(None, lambda group, bucket: compress(group, bucket))
    return wrapped


def _compression_hook(dtype: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook if dtype == "bf16" else default_hooks.fp16_compress_hook


def synchronised_only_if(last: bool, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Gradients meet once per optimizer step: on its last micro-batch."""
    if not last and isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    if (set_synchronised := getattr(model, "set_requires_gradient_sync", None)) is not None:
        set_synchronised(last)  # FSDP's way to say the same
    return contextlib.nullcontext()
