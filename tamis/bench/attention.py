"""`tamis bench attention`: Native Sparse Attention, whole and in parts, and PyTorch's dense attention, in one run.

Tokens per call stay the same whatever the length. The kernels must first agree with the reference on this device, or
nothing is reported. Prints tables for people; the verb adds the document as one line of JSON.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis.attention import functional as backend
from tamis.attention.verify import verify
from tamis.bench import branches
from tamis.bench.branches import SHAPES, Shape, Timed
from tamis.bench.choices import count_choices
from tamis.bench.document import begin_document, kept_when_interrupted
from tamis.bench.model_inputs import layer_inputs, load_trained, shape_of_model
from tamis.bench.sizes import print_other_tokens, sequences_in
from tamis.generate.load import LoadedModel, device_for

REFERENCE_UP_TO = 2048


class Disagreement(RuntimeError):
    """The kernels do not agree with the reference here: there is nothing worth timing."""


def measure_attention(
    shapes: Sequence[str],
    lengths: Sequence[int],
    tokens: int,
    repeats: int = 7,
    device: str | None = None,
    graph: bool = False,
    model: Path | None = None,
) -> dict[str, Any]:
    """Measure every shape at every length; prints the tables, returns the document.

    With `graph` every call is replayed from a CUDA graph, as training does; else calls are queued one behind the other.
    With a trained `model`, the shape is the model's, and its layers are measured on held-out text too.
    """
    place = device_for(device or "auto")
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    if graph and place.type != "cuda":
        raise ValueError("CUDA graphs need a GPU: leave --graph out")
    trained = load_trained(model, max(lengths), place.type) if model else None
    ceilings = measure_ceilings(place, dtype)
    rows: list[dict[str, Any]] = []
    document = begin_document("attention", place)
    document |= {"dtype": str(dtype), "tokens": tokens, "graph": graph, **ceilings, "rows": rows}
    print(f"{document['device']}, {dtype}, {tokens:,} tokens per call, torch {torch.__version__}")
    print_other_tokens(tokens, lengths)
    print(f"ceilings measured here: {ceilings['tflops']:.4g} TFLOP/s matmul, {ceilings['tb_per_s']:.4g} TB/s copy")
    with kept_when_interrupted(document):
        for shape in [shape_of_model(trained)] if trained else [SHAPES[s] for s in shapes]:
            check_agreement(shape, place, dtype)
            for length in lengths:
                rows += measure_length(shape, length, tokens, place, dtype, repeats, ceilings, graph, trained)
                print(f"{length:,} tokens, both directions: {_summary(rows, shape, length)}", flush=True)
            print_tables(shape, lengths, [row for row in rows if row["shape"] == shape.name])
    return document


def _summary(rows: list[dict[str, Any]], shape: Shape, length: int) -> str:
    """The first results of one length, before the tables."""
    timed = [row for row in rows if (row["shape"], row["length"]) == (shape.name, length) and row["both_ms"]]
    shown = [row for row in timed if row["name"].startswith(("dense", "whole"))]
    return "; ".join(f"{row['name']} {row['choices']} {row['both_ms']:.3g} ms".replace("  ", " ") for row in shown)


def check_agreement(shape: Shape, place: torch.device, dtype: torch.dtype) -> None:
    """Prove the kernels at this shape, or raise with what failed."""
    print(f"\n{shape.name}: {shape.heads} heads in {shape.groups} groups of dim {shape.dim}, {shape.spec}")
    print(backend.describe(place, dtype, shape.dim))
    checks = verify(place, dtype, shape.heads, shape.groups, shape.dim, shape.spec)
    failed = [str(check) for check in checks if not check.passed]
    if failed:
        raise Disagreement("the kernels disagree with the reference, so nothing is reported:\n" + "\n".join(failed))
    worst = max(checks, key=lambda check: check.measured)
    print(f"agrees with the reference in {len(checks)} checks, worst {worst.name}: {worst.measured:.1e}", flush=True)


def measure_length(
    shape: Shape,
    length: int,
    tokens: int,
    place: torch.device,
    dtype: torch.dtype,
    repeats: int,
    ceilings: dict,
    graph: bool = False,
    trained: LoadedModel | None = None,
) -> list[dict[str, Any]]:
    batch = sequences_in(tokens, length)
    floor = branches.least_work(shape, batch, length, dtype.itemsize)

    def measure_choices(inputs: list[Tensor], choices: str) -> list[dict[str, Any]]:
        whole = measure(branches.whole(shape, inputs, choices), place, repeats, graph)
        for direction, (flops, size) in floor.items():
            least_ms = max(flops / (ceilings["tflops"] * 1e12), size / (ceilings["tb_per_s"] * 1e12)) * 1e3
            if whole[f"{direction}_ms"]:
                whole[f"{direction}_of_roofline"] = round(least_ms / whole[f"{direction}_ms"], 3)
        whole |= count_choices(inputs, shape.spec)
        return [whole, *(measure(x, place, repeats, graph) for x in branches.parts(shape, inputs, choices))]

    rows = []
    for choices in ("random", "clustered"):
        inputs = branches.make_inputs(shape, batch, length, place, dtype, clustered=choices == "clustered")
        if choices == "random":
            rows += [measure(x, place, repeats, graph) for x in branches.dense(inputs)]
            if length <= REFERENCE_UP_TO:
                rows.append(measure(branches.plain_reference(shape, inputs), place, 1))
        rows += measure_choices(inputs, choices)
    if trained:
        layers = [measure_choices(inputs, "trained") for inputs in layer_inputs(trained, batch, length)]
        rows += [mean_of_layers(same) for same in zip(*layers, strict=True)]
    cudnn = rows[0]
    for row in rows:
        row |= {"shape": shape.name, "length": length, "batch": batch, "tokens": batch * length}
        if row["both_ms"] and cudnn["both_ms"]:
            row["both_over_cudnn"] = round(row["both_ms"] / cudnn["both_ms"], 3)
    return rows


def mean_of_layers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every number that all layers have, and the layers' own rows."""
    numbers = [key for key in rows[0] if all(isinstance(row.get(key), int | float) for row in rows)]
    mean = {key: round(statistics.fmean(row[key] for row in rows), 4) for key in numbers}
    named = {"name": rows[0]["name"], "choices": rows[0]["choices"], "forward_ms": None, "both_ms": None}
    return {**named, **mean, "layers": list(rows)}


def measure(timed: Timed, place: torch.device, repeats: int, graph: bool = False) -> dict[str, Any]:
    """Median milliseconds of forward and of both, and the peak memory of both above what was there."""
    row: dict[str, Any] = {"name": timed.name, "choices": timed.choices, "forward_ms": None, "both_ms": None}
    try:
        row["forward_ms"] = median_ms(timed.forward, place, repeats, graph)
        if timed.both:
            row |= {"both_ms": median_ms(timed.both, place, repeats, graph), "peak_gib": peak_gib(timed.both, place)}
    except RuntimeError as error:  # a kernel that does not take this shape, or memory that does not suffice
        row["error"] = str(error).splitlines()[0][:200]
    return row


def median_ms(call: Callable[[], object], place: torch.device, repeats: int, graph: bool = False) -> float:
    for _ in range(1 if repeats == 1 else 2):
        call()
    if graph:
        call = captured(call)
        call()
    if place.type != "cuda":
        return round(statistics.median(_seconds(call) for _ in range(repeats)) * 1e3, 4)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(begin.elapsed_time(end) for begin, end in events), 4)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of the call; the call has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a part may exist backward alone
        with torch.cuda.graph(graph):
            call()
    return graph.replay


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def peak_gib(call: Callable[[], object], place: torch.device) -> float | None:
    if place.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def measure_ceilings(place: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """What this device does at best: a large matrix product, and a large copy (bytes read plus bytes written)."""
    side, size = (8192, 1 << 30) if place.type == "cuda" else (512, 1 << 24)
    a, b = (torch.empty(side, side, dtype=dtype, device=place).normal_() for _ in range(2))
    source = torch.empty(size, dtype=torch.uint8, device=place).random_()
    target = torch.empty_like(source)
    product, copy = median_ms(lambda: a @ b, place, 10), median_ms(lambda: target.copy_(source), place, 10)
    return {"tflops": round(2 * side**3 / product / 1e9, 4), "tb_per_s": round(2 * size / copy / 1e9, 5)}


def print_tables(shape: Shape, lengths: Sequence[int], rows: list[dict[str, Any]]) -> None:
    for title, key in (
        ("forward, ms", "forward_ms"),
        ("forward + backward, ms", "both_ms"),
        ("forward + backward over dense cudnn", "both_over_cudnn"),
        ("peak memory of forward + backward above the inputs, GiB", "peak_gib"),
        ("share of the measured roofline, forward + backward", "both_of_roofline"),
        ("different blocks that a tile of neighbouring queries chooses", "union_blocks"),
        ("share of tiles that walk them as a union", "union_tiles"),
    ):
        names = list(dict.fromkeys((r["name"], r["choices"]) for r in rows if r.get(key) is not None))
        if not names:
            continue
        print(f"\n{shape.name}: {title}\n{'':24}" + "".join(f"{n:>9}" for n in lengths))
        for name, choices in names:
            found = {r["length"]: r.get(key) for r in rows if (r["name"], r["choices"]) == (name, choices)}
            cells = "".join(f"{'–' if found.get(n) is None else format(found[n], '.3g'):>9}" for n in lengths)
            print(f"{name + (', ' + choices if choices else ''):24}{cells}", flush=True)
