"""Memory dumps around a step (`runtime.mem_dump_every`), and advice when a GPU runs out of memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import torch

from tamis.config import Config
from tamis.config.size import GIB
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_json_atomic, write_text_atomic
from tamis.train.distributed import Ranks


class MemoryDumps:
    """Writes mem_pre_step{N} and mem_post_step{N} on each rank, every `every` steps; 0: never."""

    def __init__(self, every: int, run: RunDirectory, ranks: Ranks) -> None:
        self.every, self.run, self.ranks = every, run, ranks

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        is_due = self.every > 0 and step % self.every == 0
        if is_due:
            self.write("pre", step)
        yield
        if is_due:
            self.write("post", step)

    def write(self, moment: str, step: int) -> None:
        """Write the figures as JSON; on a GPU also the table of PyTorch's allocator."""
        self.run.require_held()
        rank, device = self.ranks.rank, self.ranks.device
        write_json_atomic(self.run.memory_dump(moment, step, f"rank{rank}.json"), memory_figures(device))
        if device.type == "cuda":
            table = torch.cuda.memory_summary(device)
            write_text_atomic(self.run.memory_dump(moment, step, f"rank{rank}.txt"), table)


def memory_figures(device: torch.device) -> dict[str, Any]:
    """Return the peak host memory of the process and the GPU allocator's statistics, in bytes."""
    figures: dict[str, Any] = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return figures | (torch.cuda.memory_stats(device) if device.type == "cuda" else {})


def out_of_memory_advice(config: Config, device: torch.device) -> str:
    """Return the keys to change so that a step fits with the same number of tokens."""
    train, runtime = config.train, config.runtime
    advice = []
    if train.batch_size > 1:
        smaller = next(n for n in range(train.batch_size - 1, 0, -1) if train.batch_size % n == 0)
        times = train.accumulate_grad_batches * train.batch_size // smaller
        advice.append(f"train.batch_size={smaller} train.accumulate_grad_batches={times} (the same tokens per step)")
    if not runtime.gradient_checkpointing:
        advice.append("runtime.gradient_checkpointing=true (less memory, slower)")
    advice.append(f"train.seq_len={max(1, train.seq_len * 3 // 4)} (changes what is trained)")
    return f"out of GPU memory{_held(device)}. Set " + ", or ".join(advice)


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    return f" ({torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB allocated at most, of {total:.1f})"
