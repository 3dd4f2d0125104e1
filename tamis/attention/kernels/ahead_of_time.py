"""Compile kernels without launching them: to fill Triton's cache by several processes, or where there is no GPU.

The launchers of `op` run on tensors without memory. A stand-in driver names the GPU, and a launch ends after the
compile. All of this changes the process, so it belongs in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

from tamis.attention import op
from tamis.attention.kernels import tuned
from tamis.attention.kernels.tables import write_tables
from tamis.attention.packing import table_sizes
from tamis.attention.spec import NSASpec, as_numbers


class TargetDriver:
    """As much of a Triton driver as a compile needs."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stop_after_compiling(
    gpu: tuned.GpuModel,
    is_wanted: Callable[[str], bool] = lambda key: True,
    on_compiled: Callable[[Any, Any, dict[str, Any]], None] = lambda function, kernel, constants: None,
) -> None:
    """From now on launches in this process compile for `gpu`, run nothing and return nothing.

    A variant of a kernel is compiled if it `is_wanted`, by a key of its own. The first time it is launched,
    `on_compiled` gets the function, the compiled kernel and the keyword arguments of the launch.
    """
    tuned.assumed = gpu
    tuned.gpu_model.cache_clear()
    triton.runtime.driver.set_active(TargetDriver(gpu.capability))
    launch, seen = JITFunction.run, set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and kernel.hash not in seen:
            seen.add(kernel.hash)
            on_compiled(self.fn, kernel, kwargs)

    def skip(*, key: str, fn: Any, **_: Any) -> bool:
        return not is_wanted(f"{fn.name} {key}")

    JITFunction.run = compile_only
    knobs.runtime.jit_cache_hook = skip


def _build_launcher(function: Any, kernel: Any, constants: dict[str, Any]) -> None:
    """Compile the C function that launches a kernel, which takes about as long; on a machine with the CUDA driver."""
    with contextlib.suppress(Exception):
        CudaLauncher(kernel.src, kernel.metadata)


def compile_in_processes(gpu: tuned.GpuModel, launch_all: Callable[[], object], processes: int) -> bool:
    """Compile what `launch_all` launches, each kernel in one of several forked processes; True if all succeeded.

    The caller must not have used a GPU, which a forked process cannot.
    """
    children = [pid for part in range(processes) if (pid := _fork(gpu, launch_all, part, processes))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return not any(codes)


def _fork(gpu: tuned.GpuModel, launch_all: Callable[[], object], part: int, parts: int) -> int:
    if pid := os.fork():
        return pid
    numbers: dict[str, int] = {}
    code = 1
    try:
        stop_after_compiling(
            gpu, lambda key: numbers.setdefault(key, len(numbers)) % parts == part, on_compiled=_build_launcher
        )
        launch_all()
        code = 0
    finally:
        os._exit(code)  # whatever the parent would do at its exit is not done twice


def launch_attention(
    dtype: torch.dtype, heads: int, groups: int, dim: int, spec: NSASpec, tokens: int, batch: int = 1,
    documents: int | None = None, longest: int = 0,
) -> None:  # fmt: skip
    """Every kernel of training at one shape, forward and backward; with `documents`, on a packed row."""
    lengths = (*[spec.compressed_blocks(tokens)] * 2, *[tokens] * 4)
    with torch.device("meta"):
        q = torch.empty(batch, tokens, heads, dim, dtype=dtype)
        keys = [torch.empty(batch, n, groups, dim, dtype=dtype) for n in lengths]
        gates = torch.empty(batch, tokens, heads, 3, dtype=dtype)
        row: Sequence[Any] = ()
        if documents is not None:
            sizes = table_sizes(documents, tokens, spec)
            flat = torch.empty(sum(sizes), dtype=torch.int32)
            write_tables(torch.empty(documents + 1, dtype=torch.int32), tokens, spec, *flat.split(sizes))
            row = (flat, documents, longest or tokens)
        inputs: list[Any] = [q, *keys, gates]
        out, *saved = op.run_forward(*inputs, as_numbers(spec), *row)  # type: ignore[call-arg]
        op.gradients(out, [*inputs, *saved], as_numbers(spec), *row)
