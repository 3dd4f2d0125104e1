"""Compile, without a GPU, every kernel the launchers would launch, as they would, and read what the binary needs.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.attention.ahead_of_time 90`; the last line is
JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

from tamis.attention.kernels.ahead_of_time import launch_attention, stop_after_compiling
from tamis.attention.kernels.tuned import GpuModel
from tamis.attention.spec import NSASpec

TUNED_WITH = "3.6."  # the Triton whose code was measured; there no kernel that may not spill does
# Bytes of spilled registers. Triton 3.7.1 spills 16 of the selected branch's backward kernel and of the decode kernel.
MOST_STACK = 0 if triton.__version__.startswith(TUNED_WITH) else 16

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def record_launches(arch: int) -> dict[str, object]:
    """From now on launches compile for `arch` and land, compiled, in the returned dict."""
    compiled: dict[str, object] = {}

    def record(function, kernel, constants) -> None:  # type: ignore[no-untyped-def]
        numbers = {k: v for k, v in constants.items() if k not in ("num_warps", "num_stages", "PRECISION")}
        compiled[f"{function.__name__} #{len(compiled)} {numbers}"] = kernel

    stop_after_compiling(GpuModel("", divmod(arch, 10)), on_compiled=record)
    return compiled


def resources(kernel) -> dict[str, int | bool]:  # type: ignore[no-untyped-def]
    """Registers, stack (spills) and shared memory in bytes, and whether it multiplies on Hopper's own instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()  # type: ignore[union-attr]
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
    }


def launch_everything(dtype: torch.dtype, heads_per_group: int, dim: int, tokens: int = 2048) -> None:
    """Every branch, forward and backward, once."""
    launch_attention(dtype, 2 * heads_per_group, 2, dim, NSASpec(), tokens)


def launch_tile(dtype: torch.dtype, heads_per_group: int, dim: int, tokens: int = 4096, cached: int = 4321) -> None:
    """The forward pass of a tile of queries over caches that hold `cached` tokens before it: both selected forms."""
    from tamis.attention.decode import kernel_tile

    spec, groups, end = NSASpec(), 2, cached + tokens
    heads, lengths = groups * heads_per_group, (spec.compressed_blocks(end), end, spec.w - 1 + tokens)
    q, gates = (torch.empty(1, tokens, heads, n, dtype=dtype) for n in (dim, 3))
    caches = tuple(torch.empty(1, n, 2, groups, dim, dtype=dtype) for n in lengths)
    kernel_tile(q, caches, gates, spec, cached, cached - spec.w + 1)  # type: ignore[arg-type]


def launch_step(
    dtype: torch.dtype, heads_per_group: int, dim: int, batch: int, window: int, cached: int = 4321
) -> None:
    """One query for each cached sequence. A window of one token is a number that Triton would make a constant."""
    from tamis.attention.kernels.decode.step import decode

    spec, groups = NSASpec(w=window), 2
    q, gates = (torch.empty(batch, groups * heads_per_group, n, dtype=dtype) for n in (dim, 3))
    lengths = (spec.compressed_blocks(cached), cached, window)
    caches = [torch.empty(batch, n, 2, groups, dim, dtype=dtype) for n in lengths]
    decode(q, *caches, gates, torch.empty(batch, dtype=torch.int64), spec)


def main() -> None:
    """Print what the kernels of each shape need; a kernel that two shapes share counts for the first."""
    arch = int(sys.argv[1])
    compiled = record_launches(arch)
    report: dict[str, dict[str, dict[str, int | bool]]] = {}
    for shape in sys.argv[2:] or ["bfloat16:6:64", "bfloat16:16:128", "float32:6:64"]:
        name, heads, dim = shape.split(":")
        already = set(compiled)
        launch_everything(getattr(torch, name), int(heads), int(dim))
        if name == "bfloat16":  # long sequences and prompts; float32 is for checks
            launch_everything(torch.bfloat16, int(heads), int(dim), tokens=8192)
            if arch >= 90 or not already:  # a tile takes as much as a sequence: one shape shows that it compiles
                launch_tile(torch.bfloat16, int(heads), int(dim))
        if not already and arch >= 90:  # tests/attention/test_decode.py compiles the usual windows
            launch_step(torch.bfloat16, 6, 64, batch=1, window=1)
        report[shape] = {name: resources(compiled[name]) for name in compiled if name not in already}
        for kernel, needs in report[shape].items():
            print(kernel[:150], needs)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
