"""The ranks of one run: how they join, exchange small values, fail together, and average their gradients.

Distribution is applied to the model from outside. With one process everything here is a no-op.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tamis.config import Config, ConfigError
from tamis.data import DataError, EndOfData
from tamis.run.files.directory import DirectoryReplaced
from tamis.run.files.lock import RunLocked
from tamis.run.files.manifest import DamagedCheckpoint
from tamis.train.network import group_store, require_private_address

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
WIRE_DTYPE = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # of gradients between ranks

# Errors that `Ranks.together` raises on every rank. The first match is raised, so subclasses come before their bases.
SHARED_ERRORS: tuple[type[Exception], ...] = (
    ConfigError,
    EndOfData,
    DataError,
    DamagedCheckpoint,
    RunLocked,
    DirectoryReplaced,
    OSError,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its run, from torchrun's environment variables."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean_(self, x: Tensor) -> Tensor:
        """Average over the ranks in place, on the device."""
        if self.world_size > 1:
            dist.all_reduce(x)
            x /= self.world_size
        return x

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank in rank order, on every rank. Small JSON values only; waits for all."""
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, nn.functional.pad(own, (0, longest - len(own))))
        return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths, strict=True)]

    def together(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank; if it fails on one, raise that rank's error on all, so that no rank waits."""
        try:
            result, failure = action(), None
        except SHARED_ERRORS as error:
            if self.world_size == 1:
                raise
            failure = next([number, str(error)] for number, kind in enumerate(SHARED_ERRORS) if isinstance(error, kind))
        failures = self.gather(failure)
        for rank, found in enumerate(failures):
            if found is not None:
                number, message = found
                everywhere = all(other == found for other in failures)
                raise SHARED_ERRORS[number](message if everywhere else f"rank {rank}: {message}")
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def exit_at_once(self, code: int) -> None:
        """End a failed process that has peers: they may be gone, or stuck where it will never join them.

        Leaving the process group in order and Python's own exit both wait for every pending collective.
        """
        if self.world_size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextlib.contextmanager
def join(config: Config) -> Iterator[Ranks]:
    """Join the process group that torchrun set up, if any, and leave it at the end."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(config, int(os.environ.get("LOCAL_RANK", 0)))
    if world_size > 1:
        if world_size != int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
            require_private_address(os.environ.get("MASTER_ADDR", "localhost"))
        backend, store = _process_backend(device, world_size), group_store(os.environ, COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    yield Ranks(rank, world_size, device)
    # Not after an error: leaving in order may wait for a peer that is gone.
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
    # NCCL refuses two ranks on one GPU; gloo allows it, which is enough to try things out.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return "cpu:gloo,cuda:nccl" if local <= torch.cuda.device_count() else "gloo"


def model_config(config: Config, ranks: Ranks) -> Config:
    """Return the configuration to build the model from: `ddp_disable_gc` turns checkpointing off for several ranks."""
    runtime = config.runtime
    if not _disables_checkpointing(config, ranks):
        return config
    return config.model_copy(update={"runtime": runtime.model_copy(update={"gradient_checkpointing": False})})


def _disables_checkpointing(config: Config, ranks: Ranks) -> bool:
    return ranks.world_size > 1 and config.runtime.gradient_checkpointing and config.runtime.ddp_disable_gc


def settings_without_effect(config: Config, ranks: Ranks) -> list[str]:
    """Describe the settings of several processes that others turn off."""
    runtime, lines = config.runtime, []
    if _disables_checkpointing(config, ranks):
        lines.append("gradient checkpointing is off: runtime.ddp_disable_gc (NSA_DDP_DISABLE_GC) is true")
    if ranks.world_size == 1 or is_sharded(config, ranks):
        return lines
    if runtime.ddp_static_graph and config.train.accumulate_grad_batches > 1:
        lines.append("DDP's static graph is off: it does not support train.accumulate_grad_batches above 1")
    if runtime.ddp_safe_mode:
        lines.append("runtime.ddp_safe_mode: no static graph, no gradient compression, no compilation")
    return lines


def is_sharded(config: Config, ranks: Ranks) -> bool:
    """Return whether parameters and optimizer state are divided among the ranks (FSDP)."""
    return ranks.world_size > 1 and config.runtime.parallel == "fsdp"


def distribute(model: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    """Wrap the model so that gradients are averaged over all ranks; with `fsdp`, parameters are divided among them."""
    if ranks.world_size == 1:
        return model
    return _shard(model, config, ranks.device) if is_sharded(config, ranks) else _replicate(model, config, ranks)


def _shard(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Apply FSDP2 block by block, in place: whole parameters exist only while their block computes.

    Autocast still chooses the compute dtype, so parameters travel in fp32. Results equal those of DDP.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    runtime = config.runtime
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    wire = WIRE_DTYPE["none" if runtime.ddp_safe_mode else runtime.ddp_compress]
    precision = MixedPrecisionPolicy(reduce_dtype=wire)
    for block in cast(nn.ModuleList, model.get_submodule("decoder.blocks")):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def _replicate(model: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    runtime = config.runtime
    # DDP's static graph does not support no_sync: its first unsynchronised backward pass fails an assertion.
    is_static = runtime.ddp_static_graph and not runtime.ddp_safe_mode and config.train.accumulate_grad_batches == 1
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=runtime.ddp_bucket_mb,
        static_graph=is_static,
        find_unused_parameters=runtime.ddp_find_unused,
        gradient_as_bucket_view=True,
    )
    if runtime.ddp_compress != "none" and not runtime.ddp_safe_mode:
        compress = _compression_hook(runtime.ddp_compress)
        # In a lambda: DDP refuses torch's bf16 hook by name without NCCL, though gloo supports bf16 as well.
        wrapped.register_comm_hook(None, lambda group, bucket: compress(group, bucket))
    return wrapped


def _compression_hook(dtype: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook if dtype == "bf16" else default_hooks.fp16_compress_hook


def synchronised_only_if(last: bool, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Average gradients once per optimizer step: on its last micro-batch."""
    if not last and isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    if (set_synchronised := getattr(model, "set_requires_gradient_sync", None)) is not None:
        set_synchronised(last)  # FSDP's equivalent of no_sync
    return contextlib.nullcontext()
