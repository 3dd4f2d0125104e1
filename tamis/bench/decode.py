"""`tamis bench decode`: times one token over caches of many lengths and batches, for NSA and PyTorch's dense attention.

Measures the attention alone and, on request, the whole model's step; counts the keys read and the bytes of the caches.
Timings rotate over several caches, so that the GPU's L2 holds none. Prints a table and one JSON line; writes a CSV.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis.attention import NSASpec
from tamis.attention.agreement import LIMIT
from tamis.attention.decode import nsa_decode
from tamis.attention.functional import describe
from tamis.bench.document import begin_document, exit_code, kept_when_interrupted
from tamis.config import build_config
from tamis.generate.load import device_for, precision_for, to_inference
from tamis.generate.sample import DecodeStep
from tamis.model import Decoder
from tamis.run.files.records import optional_write

COLD_BYTES = 200 << 20  # touched by one round of calls: four times an H200's L2
MOST_CACHE_BYTES = 16 << 30
COLUMNS = ("batch", "length", "nsa_ms", "dense_ms", "dense_kernel", "speedup", "layer_tokens_per_s", "reads",
           "reads_formula", "cache_mib", "step_ms", "dense_step_ms", "tokens_per_s", "dense_tokens_per_s")  # fmt: skip


@dataclass(frozen=True)
class DecodeShape:
    """The heads of one layer, and the precision and device of its caches."""

    heads: int
    groups: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def caches(self, spec: NSASpec, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return compressed, selected and window caches full of random keys and values."""
        counts = (spec.compressed_blocks(length) + 1, length, min(spec.w, length))
        compressed, selected, window = (self._random(batch, n, 2, self.groups, self.dim) for n in counts)
        return compressed, selected, window

    def query(self, batch: int) -> tuple[Tensor, Tensor]:
        return self._random(batch, self.heads, self.dim), torch.sigmoid(self._random(batch, self.heads, 3))

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device).normal_()

    @property
    def bytes_per_key(self) -> int:
        return 2 * self.groups * self.dim * self.dtype.itemsize


def measure_decoding(
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: int = 12,
    groups: int = 2,
    dim: int = 64,
    spec: NSASpec | None = None,
    repeats: int = 30,
    with_model: bool = False,
    device: str = "auto",
    precision: str | None = None,
    out_dir: str | Path = "artifacts/bench",
) -> dict[str, Any]:
    """Measure every batch and length; write decode.csv and decode_summary.txt; print the table and the document.

    An interrupted bench writes neither file: those of an earlier one stay.
    """
    spec = spec or NSASpec()
    target = device_for(device)
    shape = DecodeShape(heads, groups, dim, precision_for(target, precision), target)
    rows: list[dict[str, Any]] = []
    sizes = {"dtype": str(shape.dtype), "heads": heads, "groups": groups, "dim": dim, "spec": vars(spec)}
    document = begin_document("decode", target) | sizes | {"rows": rows}
    lines = [f"decode on {document['device']}, {shape.dtype}, {heads} heads in {groups} groups of dim {dim}, {spec}"]
    lines += [describe(target, shape.dtype, dim), _titles()]
    print("\n".join(lines), flush=True)
    with kept_when_interrupted(document):
        for length in lengths:
            for batch in batches:
                rows.append(measure_row(shape, spec, batch, length, repeats, with_model))
                lines.append(_line(rows[-1]))
                print(lines[-1], flush=True)
    if not exit_code(document):
        with optional_write():
            _write(Path(out_dir), rows, lines)
    print(json.dumps(document))
    return document


def measure_row(
    shape: DecodeShape, spec: NSASpec, batch: int, length: int, repeats: int, with_model: bool
) -> dict[str, Any]:
    nsa_ms, reads = time_nsa(shape, spec, batch, length, repeats)
    dense_ms, kernel = time_dense(shape, batch, length, repeats)
    keys = spec.compressed_blocks(length) + 1 + length + min(spec.w, length)
    row = {
        "batch": batch,
        "length": length,
        "nsa_ms": round(nsa_ms, 5),
        "dense_ms": round(dense_ms, 5),
        "dense_kernel": kernel,
        "speedup": round(dense_ms / nsa_ms, 2),
        "layer_tokens_per_s": round(batch / nsa_ms * 1e3),
        "reads": reads,
        "reads_formula": spec.reads_per_token(length),
        "cache_mib": round(batch * keys * shape.bytes_per_key / 2**20, 2),
    }
    return row | (_model_steps(shape, spec, batch, length, repeats) if with_model else {})


def time_nsa(shape: DecodeShape, spec: NSASpec, batch: int, length: int, repeats: int) -> tuple[float, int]:
    """Return the milliseconds for the last token of full caches, and the keys each group read for it."""
    touched = batch * spec.reads_per_token(length) * shape.bytes_per_key
    kept = batch * length * shape.bytes_per_key
    sets = [(*shape.query(batch), shape.caches(spec, batch, length)) for _ in range(_rounds(touched, kept, shape))]
    positions = torch.full((batch,), length - 1, device=shape.device)

    def call(i: int) -> tuple[Tensor, Tensor, Tensor]:
        q, gates, caches = sets[i]
        return nsa_decode(q, *caches, gates, positions, spec)

    reads = _check_agreement(call(0), sets[0], positions, spec)
    return time_ms(call, len(sets), repeats, shape.device), reads


def _check_agreement(got: tuple[Tensor, Tensor, Tensor], inputs: Any, positions: Tensor, spec: NSASpec) -> int:
    """Refuse to time kernels that disagree with the reference on the last sequence; return the keys each group read."""
    q, gates, caches = inputs
    exact_q, compressed, selected, window, exact_gates = (x[-1:].float() for x in (q, *caches, gates))
    expected, _, reads = nsa_decode(
        exact_q, compressed, selected, window, exact_gates, positions[-1:], spec, kernels=False
    )
    error = (got[0][-1:].float() - expected).norm() / expected.norm()
    if not error < LIMIT[q.dtype]:
        raise RuntimeError(f"decode disagrees with the reference by {error:.2e}: nothing is reported")
    counted = set(got[2].flatten().tolist())
    if counted != set(reads.flatten().tolist()):
        raise RuntimeError(f"the kernels read {sorted(counted)} keys, their index lists hold {reads.tolist()}")
    return int(counted.pop())


def time_dense(shape: DecodeShape, batch: int, length: int, repeats: int) -> tuple[float, str]:
    """Return the milliseconds of PyTorch's fastest attention kernel over the full cache, and its name."""
    kept = batch * length * shape.bytes_per_key
    sets = []
    for _ in range(_rounds(kept, kept, shape)):
        q = shape._random(batch, shape.groups, shape.heads // shape.groups, shape.dim)
        sets.append((q, *(shape._random(batch, shape.groups, length, shape.dim) for _ in range(2))))

    def rows_of_a_group(i: int) -> Tensor:  # one query: its group's heads see the same keys, as rows of one head
        q, k, v = sets[i]
        return F.scaled_dot_product_attention(q, k, v)

    def grouped(i: int) -> Tensor:
        q, k, v = sets[i]
        return F.scaled_dot_product_attention(q.flatten(1, 2).unsqueeze(2), k, v, enable_gqa=True)

    best, name = math.inf, "none"
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        if backend == SDPBackend.MATH and shape.device.type == "cuda" and best < math.inf:
            continue  # materialises the scores: only if nothing else runs
        for call in (grouped, rows_of_a_group):
            try:
                with sdpa_kernel(backend):
                    ms = time_ms(call, len(sets), repeats, shape.device)
            except RuntimeError:  # this kernel does not take this shape or device
                continue
            if ms < best:
                best, name = ms, f"{backend.name.lower()}/{call.__name__}"
    return best, name


def time_ms(call: Callable[[int], object], sets: int, repeats: int, device: torch.device) -> float:
    """Return the median milliseconds of one call; on a GPU within a CUDA graph of one call per input set."""
    if device.type != "cuda":
        times = []
        for i in range(repeats):
            started = time.perf_counter()
            call(i % sets)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3
    graph = _captured(lambda: [call(i) for i in range(sets)])
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / sets


def _captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph


def _model_steps(shape: DecodeShape, spec: NSASpec, batch: int, length: int, repeats: int) -> dict[str, Any]:
    """Time one whole decode step of a fresh M7C, and of its dense twin."""
    nsa, dense = (time_step(attention, shape.dtype, shape.device, spec, batch, length, repeats)
                  for attention in ("nsa", "dense"))  # fmt: skip
    return {
        "step_ms": round(nsa, 4),
        "dense_step_ms": round(dense, 4),
        "tokens_per_s": round(batch / nsa * 1e3),
        "dense_tokens_per_s": round(batch / dense * 1e3),
    }


def time_step(
    attention: str, dtype: torch.dtype, device: torch.device, spec: NSASpec, batch: int, length: int, repeats: int
) -> float:
    """Return the median milliseconds of one token for every sequence, ending at `length` tokens.

    Caches full of random numbers replace a long prompt.
    """
    model = Decoder(build_config({"model": {"attention": attention}, "nsa": vars(spec)}), max_len=length)
    to_inference(model, device, dtype)
    cache = model.new_cache(batch)
    for layer in cache.layers:
        for tensor in layer.tensors():
            tensor.normal_()
    repeats = min(repeats, length - 1)
    cache.reserve(length - repeats - 1)
    cache.positions_B += length - repeats - 1
    step, tokens = DecodeStep(model, cache), torch.zeros(batch, dtype=torch.int64, device=device)
    times = []
    for _ in range(repeats + 1):
        started = _now(device)
        step(tokens)
        times.append(_now(device) - started)
    return statistics.median(times[1:]) * 1e3  # the first step captures the graph


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _rounds(touched: int, kept: int, shape: DecodeShape) -> int:
    """Return the number of input sets to rotate over: enough to exceed the GPU's cache, as far as memory allows."""
    if shape.device.type != "cuda":
        return 1
    return max(1, min(math.ceil(COLD_BYTES / touched), MOST_CACHE_BYTES // kept))


def _titles() -> str:
    titles = ("length", "batch", "NSA ms", "dense ms", "speedup", "reads", "MiB", "step ms", "dense step", "tok/s")
    return "".join(f"{title:>11}" for title in titles)


def _line(row: dict[str, Any]) -> str:
    known = f"{row['length']:11d}{row['batch']:11d}{row['nsa_ms']:11.4f}{row['dense_ms']:11.4f}{row['speedup']:11.2f}"
    known += f"{row['reads']:11d}{row['cache_mib']:11.1f}"
    if "step_ms" in row:
        known += f"{row['step_ms']:11.3f}{row['dense_step_ms']:11.3f}{row['tokens_per_s']:11d}"
    return known


def _write(folder: Path, rows: list[dict[str, Any]], lines: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "decode.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "decode_summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
