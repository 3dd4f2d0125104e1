"""`tamis tune`: times candidate tiles of the attention kernels on the present GPU, and stores the fastest.

A candidate counts only if its results agree with those of the shipped tile. Kernels are timed at one length, 65,536
tokens per call. Other processes compile the candidates first: `python -m tamis.bench.tune` is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.attention.agreement import LIMIT, relative_rmse
from tamis.attention.functional import why_no_kernels
from tamis.attention.kernels.ahead_of_time import compile_in_processes
from tamis.attention.kernels.banded.keys import copies_rows, key_gradients
from tamis.attention.kernels.banded.queries import Rows, copies_boxes, copies_heads
from tamis.attention.kernels.banded.query_gradients import SelectedParts, write_query_gradient
from tamis.attention.kernels.gates import mix_backward
from tamis.attention.kernels.launch import block_tiles, copies_tiles, padded, specializes_warps, takes_halves
from tamis.attention.kernels.selected.backward import CHUNKS_OF_CUT, selected_backward
from tamis.attention.kernels.selected.layout import Layout, chunks_of
from tamis.attention.kernels.selected.pairs import DENSE_UP_TO, pairs_forward, reads_rows
from tamis.attention.kernels.selected.union import copies_blocks, tokens_of_boxes, union_forward
from tamis.attention.kernels.selection import select_from_lse, walks_heads
from tamis.attention.kernels.tiles import AnyTile, candidates
from tamis.attention.kernels.tuned import GpuModel, gpu_model, shape_key, tiles_file, using, write_tiles
from tamis.attention.op import compressed_band, compressed_forward, prefix_of, window_band, window_forward
from tamis.attention.spec import as_numbers
from tamis.bench.attention import median_ms
from tamis.bench.document import begin_document
from tamis.config import Config
from tamis.model import DTYPES
from tamis.run.files.console import say
from tamis.train.tools.early_compile import processes_that_fit

TOKENS = 65536  # per call
OTHER_CHOICES = 1e-3  # share of block ids that may differ: equal scores, rounded otherwise
FINALISTS = 3  # timed again, in turn with the shipped tile
LEAST_GAIN = 0.01  # of the time; less is noise
BROKEN = ("illegal memory access", "misaligned address", "unspecified launch failure")  # the GPU serves no more


@dataclass(frozen=True)
class TuneShape:
    """What is tuned: attention of one layer, at one length."""

    heads: int
    groups: int
    dim: int
    dtype: torch.dtype
    spec: NSASpec
    length: int

    @property
    def key(self) -> str:
        return shape_key(self.dtype, self.heads // self.groups, padded(self.dim))

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)


@dataclass(frozen=True)
class KernelCall:
    """A kernel by its name in the tables, and a call that launches it and returns what it computed."""

    kernel: str
    call: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Timing:
    tile: AnyTile
    ms: float


def shape_of(config: Config, length: int | None = None) -> TuneShape:
    """The attention of a config's layers, at the length it trains on unless another is given."""
    model, dtype = config.model, DTYPES[config.runtime.precision]
    if "nsa" not in config.layer_kinds:
        raise ValueError(f"model.attention is {model.attention!r}: only NSA layers have tiles to tune")
    length = length or min(config.train.seq_len, TOKENS)
    return TuneShape(model.n_heads, model.n_kv_groups, model.d_k, dtype, NSASpec.of(config.nsa), length)


def measure_tiles(shape: TuneShape, processes: int | None = None) -> dict[str, Any]:
    """Tune every kernel of a shape on this machine's GPU, store the tiles, print a table and return the document."""
    device = torch.device("cuda", 0)
    gpu, path = require_gpu(shape), tiles_file()
    if path is None:
        raise ValueError("TAMIS_TILES is off, so there is no file to store tiles in: unset it, or name a file")
    compile_candidates(shape, gpu, processes or processes_that_fit())
    document = begin_document("tune", device)
    say(f"timing at {shape.length:,} tokens, {shape.key}, on {gpu.name}", sys.stderr)
    rows: list[dict[str, Any]] = []
    for each in kernel_calls(shape, device):
        shipped, best, tried, skipped = tune_kernel(each, shape, gpu, lambda call, n: median_ms(call, device, n))
        rows.append({"kernel": each.kernel, "shipped": str(shipped.tile), "shipped_ms": shipped.ms})
        rows[-1] |= {"best": str(best.tile), "best_ms": best.ms, "tried": tried, "skipped": skipped, "tile": best.tile}
        _print_row(rows[-1])
    write_tiles(path, gpu, shape.key, {row["kernel"]: row.pop("tile") for row in rows})
    print(f"stored in {path} for {gpu.key}; delete it, or set TAMIS_TILES=off, for the shipped tiles")
    return document | {"gpu": gpu.key, "shape": shape.key, "length": shape.length, "file": str(path), "rows": rows}


def require_gpu(shape: TuneShape) -> GpuModel:
    """The model of the GPU that is tuned, or a refusal."""
    if not torch.cuda.is_available():
        raise ValueError(
            "tamis tune times kernels on a GPU, and torch finds none here: run it on the machine that trains. "
            "Without it the shipped tiles serve"
        )
    gpu = gpu_model(torch.device("cuda", 0))
    assert gpu is not None
    reason = why_no_kernels("cuda", shape.dtype, shape.dim, shape.heads // shape.groups)
    if reason:
        raise ValueError(f"there is nothing to tune: {reason}")
    if len(candidates("forward", gpu.family, shape.dtype, padded(shape.dim))) == 1:
        raise ValueError(f"{shape.key} has one tile for each kernel: tune half precision with head dims up to 128")
    return gpu


def compile_candidates(shape: TuneShape, gpu: GpuModel, processes: int) -> None:
    """Compile all candidates in processes without a GPU; what fails there fails again, and is skipped, when timed."""
    say(f"compiling the candidates in {processes} processes; on few cores this takes minutes", sys.stderr)
    job = {
        "sizes": [shape.heads, shape.groups, shape.dim],
        "dtype": str(shape.dtype).removeprefix("torch."),
        "spec": as_numbers(shape.spec),
        "length": shape.length,
        "gpu": [gpu.name, gpu.capability],
        "processes": processes,
    }
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-m", "tamis.bench.tune", json.dumps(job)], env=environment, check=False)


def main() -> None:
    """Compile what `compile_candidates` asks for."""
    job = json.loads(sys.argv[1])
    heads, groups, dim = job["sizes"]
    shape = TuneShape(heads, groups, dim, getattr(torch, job["dtype"]), NSASpec(*job["spec"]), job["length"])
    name, (major, minor) = job["gpu"]
    gpu = GpuModel(name, (major, minor))
    compile_in_processes(gpu, lambda: launch_candidates(shape, gpu), job["processes"])


def launch_candidates(shape: TuneShape, gpu: GpuModel) -> None:
    for each in kernel_calls(shape, torch.device("meta")):
        for tile in candidates(each.kernel, gpu.family, shape.dtype, padded(shape.dim)):
            with using({each.kernel: tile}):
                try:
                    each.call()
                except Exception:  # a tile that does not compile
                    continue


def kernel_calls(shape: TuneShape, device: torch.device) -> Iterator[KernelCall]:
    """Every kernel that has candidates, with inputs like those of training. The union is timed where it is used.

    Kernels in Gluon have no candidates: where they replace a kernel, that one is not timed.
    """
    spec, R = shape.spec, shape.heads // shape.groups
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = attention_inputs(shape, shape.length, device)
    dout = torch.randn_like(q)
    copied = "_copied" if copies_tiles(R, k_cmp, v_cmp) else ""

    def forward() -> list[Tensor]:
        window = window_forward(q, k_win, v_win, spec, trusted=True)
        return [*window, *compressed_forward(q, k_cmp, v_cmp, spec, trusted=True)]

    if not (copies_heads(q, k_cmp, v_cmp) or copies_boxes(q, k_cmp, v_cmp)):
        yield KernelCall("forward" + copied, forward)
    win, lse_win, cmp, lse_cmp = forward()
    if not walks_heads(q, k_cmp, spec):
        yield KernelCall("score", lambda: [select_from_lse(q, k_cmp, lse_cmp, spec, trusted=True)])
    ids = select_from_lse(q, k_cmp, lse_cmp, spec, trusted=True)
    if not reads_rows(q, k_sel, v_sel, spec):
        yield KernelCall("pairs", lambda: pairs_forward(q, k_sel, v_sel, ids, spec))
    sel, lse_sel = pairs_forward(q, k_sel, v_sel, ids, spec)
    _, weights, delta = mix_backward(dout, cmp, sel, win, gates, trusted=True)
    bands = (
        (window_band(k_win, v_win, spec), Rows(lse_win, weights[2], delta[2])),
        (compressed_band(k_cmp, v_cmp, spec), Rows(lse_cmp, weights[0], delta[0])),
    )
    dkv = "dkv_copied" if copies_rows(q, dout, R) else "dkv"
    if not specializes_warps(q, dout):
        yield KernelCall(dkv, lambda: [x for band in bands for x in key_gradients(q, *band, dout)])

    prefix = None
    if shape.length > spec.n_sel * spec.l_sel:  # a shorter call of this size has no lists, but smaller calls do
        prefix = prefix_of(q, k_sel, v_sel, dout, Rows(lse_sel, weights[1], delta[1]), spec)
    left, scale = parts_left(q, ids, spec), bands[0][0].scale

    def query_gradient() -> list[Tensor]:
        dq = torch.zeros_like(q)
        write_query_gradient(q, dout, dq, scale, bands, left, prefix)
        return [dq]

    yield KernelCall("dq" + copied, query_gradient)

    def backward() -> list[Tensor]:
        dq = torch.empty_like(q)
        gradients = lse_sel, dout, gates[..., 1], delta[1], dq
        of_keys = selected_backward(q, k_sel, v_sel, ids, *gradients, spec, trusted=True, dense=bands, prefix=prefix)
        return [*of_keys, dq]

    yield KernelCall("halves" if takes_halves(q, R) else "backward", backward)
    if not (copies_blocks(q, k_sel, v_sel, spec) or tokens_of_boxes(q, k_sel, v_sel, spec)):
        yield union_call(shape, device)


def parts_left(q: Tensor, ids: Tensor, spec: NSASpec) -> SelectedParts:
    """Partial query gradients of one chunk, as the selected branch leaves them for the pass that writes dq.

    Timed without them, a tile of half the keys was faster; with them, as in training, it is slower.
    """
    chunks, (_, parts_of_block) = chunks_of(q, spec, None, CHUNKS_OF_CUT), block_tiles(spec)
    layout = Layout.of(ids, spec, chunks)
    rows = layout.pairs_per_chunk * parts_of_block * (q.shape[2] // layout.groups)
    gradients = q.new_empty(rows, q.shape[3]).normal_(std=0.1)
    return SelectedParts(gradients, ids, parts_of_block, *layout.chunk_from(0))


def union_call(shape: TuneShape, device: torch.device) -> KernelCall:
    """The union over every tile, at a length where it runs alone."""
    spec, longest = shape.spec, DENSE_UP_TO * shape.spec.n_sel * shape.spec.l_sel
    q, k_cmp, v_cmp, k_sel, v_sel, *_ = attention_inputs(shape, min(shape.length, longest), device)
    _, lse = compressed_forward(q, k_cmp, v_cmp, spec, trusted=True)
    ids = select_from_lse(q, k_cmp, lse, spec, trusted=True)
    copied = copies_tiles(shape.heads // shape.groups, k_sel, v_sel)
    return KernelCall("union_copied" if copied else "union", lambda: union_forward(q, k_sel, v_sel, ids, spec)[:2])


def attention_inputs(shape: TuneShape, length: int, device: torch.device) -> list[Tensor]:
    """Random tensor arguments of `nsa_attention`, as many tokens as are timed."""
    batch, blocks = max(1, shape.batch * shape.length // length), shape.spec.compressed_blocks(length)
    sizes = [(length, shape.heads, shape.dim), *((n, shape.groups, shape.dim) for n in [blocks] * 2 + [length] * 4)]
    torch.manual_seed(0)
    tensors = [torch.randn(batch, *size, dtype=shape.dtype, device=device) for size in sizes]
    return [*tensors, torch.rand(batch, length, shape.heads, 3, dtype=shape.dtype, device=device)]


def tune_kernel(
    each: KernelCall, shape: TuneShape, gpu: GpuModel, clock: Callable[[Callable[[], object], int], float]
) -> tuple[Timing, Timing, int, int]:
    """Time a kernel's candidates; returns the shipped tile and the best, and how many were timed and skipped."""
    shipped, *others = candidates(each.kernel, gpu.family, shape.dtype, padded(shape.dim))
    with using({each.kernel: shipped}):
        expected = [x.clone() for x in each.call()]
    timings, skipped = [], 0
    for tile in others:
        with using({each.kernel: tile}):
            if (ms := _checked_ms(each, tile, expected, clock)) is None:
                skipped += 1
            else:
                timings.append(Timing(tile, ms))
    finalists = sorted(timings, key=lambda timing: timing.ms)[:FINALISTS]
    finals = []
    for tile in (shipped, *(timing.tile for timing in finalists)):
        with using({each.kernel: tile}):
            finals.append(Timing(tile, clock(each.call, 15)))
    best = min(finals, key=lambda timing: timing.ms)
    gains = best.ms < finals[0].ms * (1 - LEAST_GAIN)
    return finals[0], best if gains else finals[0], len(timings) + 1, skipped


def _checked_ms(
    each: KernelCall, tile: AnyTile, expected: Sequence[Tensor], clock: Callable[[Callable[[], object], int], float]
) -> float | None:
    """Milliseconds of a candidate; None if it does not fit the GPU or disagrees with the shipped tile."""
    try:
        if not all(agrees(got, want) for got, want in zip(each.call(), expected, strict=True)):
            return None
        return clock(each.call, 5)
    except Exception as error:
        if any(symptom in str(error) for symptom in BROKEN):
            raise RuntimeError(
                f"{each.kernel} with {tile} broke the GPU's context; nothing is stored: {error}"
            ) from None
        return None  # too much shared memory or too many registers


def agrees(got: Tensor, want: Tensor) -> bool:
    """Whether two tiles computed the same: block ids, log-sum-exps (−inf where a query sees nothing) or numbers."""
    if not want.is_floating_point():
        return float((got != want).float().mean()) <= OTHER_CHOICES
    hidden = want == -torch.inf
    if not torch.equal(got == -torch.inf, hidden):
        return False
    return relative_rmse(got.masked_fill(hidden, 0), want.masked_fill(hidden, 0)) <= LIMIT[want.dtype]


def _print_row(row: dict[str, Any]) -> None:
    gain = row["shipped_ms"] / row["best_ms"] - 1
    change = f"{row['best']} {row['best_ms']:.3f} ms, {gain:+.1%}" if row["best"] != row["shipped"] else "stays"
    counts = f"{row['tried']} timed, {row['skipped']} skipped"
    print(f"{row['kernel']:15} {row['shipped']} {row['shipped_ms']:.3f} ms → {change} ({counts})", flush=True)


if __name__ == "__main__":
    main()
