"""One all-reduce across all ranks: checks that the processes reach each other. The preflight runs it by torchrun."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
ELEMENTS = 1 << 20  # large enough that NCCL takes the path gradients take


def check_all_reduce() -> str:
    """Return the result as a sentence; a wrong sum raises, a rank that does not answer runs into the timeout."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(f"rank {rank}: the sum over {world_size} ranks must be {expected}, got {values[0].item()}")
    backend = dist.get_backend()
    dist.barrier()
    dist.destroy_process_group()
    return f"{backend}: sum over {world_size} ranks is right"


if __name__ == "__main__":
    sentence = check_all_reduce()
    if os.environ["RANK"] == "0":
        print(sentence, flush=True)
