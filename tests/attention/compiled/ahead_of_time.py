"""Compile, without a GPU, every kernel the launchers would launch, as they would, and read what the binary needs.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.attention.compiled.ahead_of_time 90`; the last
line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import patch

import torch
import triton

from tamis.attention.kernels import launch
from tamis.attention.kernels.ahead_of_time import launch_attention, stop_after_compiling
from tamis.attention.kernels.banded.keys import key_gradients
from tamis.attention.kernels.banded.queries import Rows, banded_forward
from tamis.attention.kernels.selection import select_from_lse
from tamis.attention.kernels.tuned import GpuModel
from tamis.attention.op import compressed_band, window_band
from tamis.attention.packing import PackedTables, table_sizes
from tamis.attention.spec import NSASpec
from tests.attention.compiled.record import RECORD, Measured, Needs, use_record

# Bytes of spilled registers. Triton 3.7.1 spills 16 of the selected branch's backward kernel and of the decode kernel.
MOST_STACK = 0 if triton.__version__.startswith(launch.MEASURED_WITH) else 16
PATIENCE_S = 850  # a busy machine compiles slowly; a hang must still end


def start_compiling(module: str, *arguments: object) -> Popen[str]:
    """Start a program that compiles without a GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return Popen(command, env=environment, text=True, stdout=PIPE, stderr=PIPE)


def report_of(process: Popen[str]) -> Any:
    """What such a program printed last; warns if it compiled kernels that are not recorded."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors[-2000:]
    if RECORD.name in errors:
        warnings.warn(errors.splitlines()[-1], stacklevel=2)
    return json.loads(output.splitlines()[-1])


def record_launches(arch: int) -> dict[str, Needs]:
    """From now on launches compile for `arch`, and what their kernels need lands in the returned dict."""
    compiled: dict[str, Needs] = {}

    def record(function: Any, kernel: Measured, constants: dict[str, Any]) -> None:
        numbers = {k: v for k, v in constants.items() if k not in ("num_warps", "num_stages", "PRECISION")}
        compiled[f"{function.__name__} #{len(compiled)} {numbers}"] = kernel.needs

    use_record()
    stop_after_compiling(GpuModel("", divmod(arch, 10)), on_compiled=record)
    return compiled


def launch_everything(dtype: torch.dtype, heads_per_group: int, dim: int, tokens: int = 2048) -> None:
    """Every branch, forward and backward, once."""
    launch_attention(dtype, 2 * heads_per_group, 2, dim, NSASpec(), tokens)


def launch_large_calls(heads_per_group: int, dim: int) -> None:
    """So many tokens that the window is last, and that head dim 64 takes the boxes of head dim 128.

    At head dim 64 the first tokens of a sequence, or document, take the dense branches' kernels: a part, or all.
    """
    shape = torch.bfloat16, 2 * heads_per_group, 2, dim, NSASpec()
    launch_attention(*shape, tokens=2048, batch=16)
    launch_packed_bands(torch.bfloat16, heads_per_group, dim, forward_alone=True)
    if dim == 64:
        launch_attention(*shape, tokens=1024, batch=32)
        for longest in (1024, 2048):
            launch_attention(*shape, tokens=32768, documents=48, longest=longest)


def launch_packed_bands(
    dtype: torch.dtype, heads_per_group: int, dim: int, tokens: int = 2048, forward_alone: bool = False
) -> None:
    """Forward, dk and dv of the dense branches on a packed row."""
    spec, groups, documents = NSASpec(), 2, 3
    heads = groups * heads_per_group
    with torch.device("meta"):
        flat = torch.empty(sum(table_sizes(documents, tokens, spec)), dtype=torch.int32)
        tables = PackedTables.of(flat, documents, tokens, tokens, spec)
        q = torch.empty(1, tokens, heads, dim, dtype=dtype)
        for band_of, keys in ((window_band, tokens), (compressed_band, spec.compressed_blocks(tokens))):
            band = band_of(*(torch.empty(1, keys, groups, dim, dtype=dtype) for _ in range(2)), spec, tables)
            out, lse = banded_forward(q, band)
            if not forward_alone:
                key_gradients(q, band, Rows(lse, lse, lse), out)


def launch_without_gluon(dtype: torch.dtype, heads_per_group: int, dim: int) -> None:
    """A long sequence as with a version of Triton for which the kernels in Gluon are not proved."""
    with patch.object(launch, "GLUON_PROVED_WITH", ("0.",)):
        launch_everything(dtype, heads_per_group, dim, tokens=8192)


def launch_choices(n_sel: int, tokens: int) -> None:
    """The choice of blocks of a sequence, and of one query after it."""
    spec = NSASpec(n_sel=n_sel)
    with torch.device("meta"):
        q, lse = torch.empty(1, tokens, 12, 64, dtype=torch.bfloat16), torch.empty(1, 12, tokens)
        select_from_lse(q, torch.empty(1, spec.compressed_blocks(tokens), 2, 64, dtype=q.dtype), lse, spec)
        launch_step(torch.bfloat16, 6, 64, 1, spec, cached=tokens)


def launch_tile(dtype: torch.dtype, heads_per_group: int, dim: int, tokens: int = 4096, cached: int = 4321) -> None:
    """The forward pass of a tile of queries over caches that hold `cached` tokens before it: both selected forms."""
    from tamis.attention.decode import kernel_tile

    spec, groups, end = NSASpec(), 2, cached + tokens
    heads, lengths = groups * heads_per_group, (spec.compressed_blocks(end), end, spec.w - 1 + tokens)
    q, gates = (torch.empty(1, tokens, heads, n, dtype=dtype) for n in (dim, 3))
    caches = tuple(torch.empty(1, n, 2, groups, dim, dtype=dtype) for n in lengths)
    kernel_tile(q, caches, gates, spec, cached, cached - spec.w + 1)  # type: ignore[arg-type]


def launch_step(dtype: torch.dtype, heads_per_group: int, dim: int, batch: int, spec: NSASpec, cached: int) -> None:
    """One query for each cached sequence."""
    from tamis.attention.kernels.decode.step import decode

    groups = 2
    q, gates = (torch.empty(batch, groups * heads_per_group, n, dtype=dtype) for n in (dim, 3))
    lengths = (spec.compressed_blocks(cached), cached, spec.w)
    caches = [torch.empty(batch, n, 2, groups, dim, dtype=dtype) for n in lengths]
    decode(q, *caches, gates, torch.empty(batch, dtype=torch.int64), spec)


def launch_usual_steps(arch: int) -> None:
    """One query for each of few and of many sequences of 65,536 tokens."""
    from tamis.attention.kernels.decode import splits, step

    splits.is_ampere, step.launches_early = lambda q: arch < 90, lambda q: arch >= 90
    for batch, heads, dim in ((1, 12, 64), (64, 12, 64), (1, 32, 128)):
        q, gates = (torch.empty(batch, heads, n, dtype=torch.bfloat16) for n in (dim, 3))
        caches = [torch.empty(batch, n, 2, 2, dim, dtype=torch.bfloat16) for n in (4096, 65536, 512)]
        step.decode(q, *caches, gates, torch.zeros(batch, dtype=torch.int64), NSASpec())


def main() -> None:
    """Print what the kernels of each shape need; a kernel that two shapes share counts for the first."""
    arch = int(sys.argv[1])
    compiled = record_launches(arch)
    report: dict[str, dict[str, Needs]] = {}
    for shape in sys.argv[2:] or ["bfloat16:6:64", "bfloat16:16:128", "float32:6:64"]:
        name, heads, dim = shape.split(":")
        already = set(compiled)
        launch_everything(getattr(torch, name), int(heads), int(dim))
        if name == "bfloat16":  # long sequences and prompts; float32 is for checks
            launch_everything(torch.bfloat16, int(heads), int(dim), tokens=8192)
            if arch >= 90 or not already:  # a tile takes as much as a sequence: one shape shows that it compiles
                launch_tile(torch.bfloat16, int(heads), int(dim))
        if not already and arch >= 90:  # the usual windows follow
            # A window of one token is a number that Triton would make a constant.
            launch_step(torch.bfloat16, 6, 64, batch=1, spec=NSASpec(w=1), cached=4321)
            launch_packed_bands(torch.bfloat16, 6, 64)
            launch_without_gluon(torch.bfloat16, 6, 64)
            for n_sel, tokens in ((32, 65536), (64, 65536), (16, 524288)):
                launch_choices(n_sel, tokens)
        report[shape] = {name: compiled[name] for name in compiled if name not in already}
        for kernel, needs in report[shape].items():
            print(kernel[:150], needs)
    already = set(compiled)
    launch_usual_steps(arch)
    report["decode"] = {name: compiled[name] for name in compiled if name not in already}
    if arch >= 90:
        already = set(compiled)
        launch_large_calls(6, 64)
        launch_large_calls(16, 128)
        launch_without_gluon(torch.bfloat16, 16, 128)
        report["large"] = {name: compiled[name] for name in compiled if name not in already}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
