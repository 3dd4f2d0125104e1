"""Parameters, gradients and optimizer state divided among the processes: PyTorch's FSDP2, block by block.

Whole parameters exist only while their block computes. Results are those of DDP; only the memory differs.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tamis.config import Config

WIRE_DTYPE = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Divide a `Loss` module in place. Autocast still chooses the compute dtype, so parameters travel in fp32."""
    runtime = config.runtime
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    wire = WIRE_DTYPE["none" if runtime.ddp_safe_mode else runtime.ddp_compress]
    precision = MixedPrecisionPolicy(reduce_dtype=wire)
    for block in cast(nn.ModuleList, model.get_submodule("decoder.blocks")):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, whole on every process, divided as `parameter` is."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    placed = value.to(parameter.device)
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)
