"""Verbs that measure: profile, tune, bench. Each bench prints a table first, and one JSON document as its last line."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer

from tamis.cli.common import MEASURE, Verb, Verbs, Words, loading_torch, resolve
from tamis.run.background import signals_handled
from tamis.run.files.console import announced

app = typer.Typer()
verb = partial(app.command, cls=Verb, rich_help_panel=MEASURE)

bench_app = typer.Typer(cls=Verbs, no_args_is_help=True)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
bench_verb = partial(bench_app.command, cls=Verb)

Tokens = Annotated[
    int | None, typer.Option(min=1, help="tokens per call or step, whatever the length; 65,536 on a GPU")
]
Lengths = Annotated[
    list[int] | None, typer.Option("--length", metavar="N", min=1, help="tokens of a sequence; repeatable")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one")]
Repeats = Annotated[int | None, typer.Option(min=1, help="timings per row; 7 on a GPU")]
Steps = Annotated[int | None, typer.Option(min=1, help="steps measured; 20 on a GPU")]
Warmup = Annotated[int | None, typer.Option(min=0, help="steps before that; 5 on a GPU")]


@bench_app.callback()
def bench(context: typer.Context) -> None:
    """Measure attention, training, decoding, retrieval.

    Examples:

      tamis bench attention --shape m7c --length 8192

      tamis bench train configs/m7c_125m_80g.yaml --length 2048
    """
    if threading.current_thread() is threading.main_thread():  # until the bench has handlers of its own
        context.with_resource(signals_handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), _end_interrupted)))


def _end_interrupted(number: int, frame: FrameType | None) -> None:
    """End the process at once: torch, while it loads, hides an exception and fails later with another one."""
    with suppress(Exception):
        sys.stdout.flush()
        print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


@verb()
def profile(
    words: Words = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to profile, after three of warm-up")] = 5,
    out: Annotated[Path | None, typer.Option(help="folder for trace and table; by default OUT/profile")] = None,
) -> None:
    """Profile a few training steps with PyTorch's profiler; writes a trace and a table.

    Example: tamis profile configs/m7c_125m_80g.yaml --steps 10
    """
    resolved = resolve(words)
    loading_torch()
    from tamis.train.tools.profile import profile_steps

    with announced(f"profiling {resolved.model.name}"):
        code = profile_steps(resolved, steps, out)
    raise typer.Exit(code)


@verb()
def tune(
    words: Words = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="tokens of a sequence; by default those of the config, at most 65,536")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="that compile; by default one per core, at most 16")
    ] = None,
) -> None:
    """Time candidate tiles of the attention kernels on this GPU and store the fastest, for later runs to use.

    The heads, sizes and precision are those of the config, as for `tamis run`. A candidate counts only if it agrees
    with the shipped tile. Takes one minute on many cores. The file, ~/.cache/tamis/tiles.json or $TAMIS_TILES, holds
    tiles per GPU model and Triton version; a missing, damaged or stale one changes nothing but speed.

    Examples:

      tamis tune configs/m7c_125m_80g.yaml

      TAMIS_TILES=off tamis bench attention --shape m7c     the shipped tiles, to compare
    """
    resolved = resolve(words)
    loading_torch()
    from tamis.bench.tune import measure_tiles, shape_of

    with announced("tuning the attention kernels"):
        document = measure_tiles(shape_of(resolved, length), processes)
    print(json.dumps(document))


@bench_verb("attention")
def bench_attention(
    shape: Annotated[
        Literal["m7c", "paper", "both"] | None,
        typer.Option(help="heads, groups and sizes to measure; both on a GPU, m7c on a CPU"),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="a run, checkpoint or export: measure its shape, and its layers on the text it held out"),
    ] = None,
    lengths: Lengths = None,
    tokens: Tokens = None,
    repeats: Repeats = None,
    device: Device = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="replay every call from a CUDA graph, as training does")
    ] = False,
) -> None:
    """Time sparse attention, whole and in parts, and PyTorch's dense attention; reports only if the kernels agree.

    Inputs are random, and random with neighbouring queries that choose alike. With a trained model, its NSA layers
    are also timed on text that it held out; the table has their mean.

    Examples:

      tamis bench attention --shape m7c --length 8192

      tamis bench attention --model artifacts/m7c_125m --length 2048
    """
    if shape and model:
        raise ValueError("--model has a shape of its own: leave --shape out")
    loading_torch()
    from tamis.bench.attention import measure_attention
    from tamis.bench.sizes import default_sizes

    sizes = default_sizes(device, lengths, tokens, repeats)
    shapes = sizes.shapes if shape is None else ("m7c", "paper") if shape == "both" else (shape,)
    with announced("measuring attention"):
        document = measure_attention(
            shapes, lengths or sizes.lengths, tokens or sizes.tokens, repeats or sizes.repeats, device, graph, model
        )
    _print_document(document)


@bench_verb("peers")
def bench_peers(
    shape: Annotated[Literal["m7c", "paper"], typer.Option(help="heads, groups and sizes to measure")] = "m7c",
    lengths: Lengths = None,
    tokens: Tokens = None,
    repeats: Repeats = None,
    device: Device = None,
) -> None:
    """Time other NSA implementations that are installed, ours and dense attention, and compare their outputs.

    Example: tamis bench peers --shape paper --length 8192
    """
    loading_torch()
    from tamis.bench.peers import measure_peers
    from tamis.bench.sizes import default_sizes

    sizes = default_sizes(device, lengths, tokens, repeats)
    with announced("measuring attention of every implementation"):
        document = measure_peers(
            shape, lengths or sizes.lengths, tokens or sizes.tokens, repeats or sizes.repeats, device
        )
    _print_document(document)


@bench_verb("paths")
def bench_paths(
    words: Words = None,
    steps: Steps = None,
    warmup: Warmup = None,
) -> None:
    """Time the same training step with sparse kernels, the plain-PyTorch reference and dense attention.

    Example: tamis bench paths configs/m7c_125m_2xa100_production.yaml --steps 20
    """
    resolved = resolve(words)
    loading_torch()
    from tamis.bench.paths import compare
    from tamis.bench.sizes import default_sizes

    sizes = default_sizes(resolved.runtime.device, steps, warmup)
    steps = steps or sizes.steps
    warmup = sizes.warmup if warmup is None else warmup
    with announced(f"measuring {warmup} + {steps} steps of each path"):
        code = compare(resolved, steps, warmup)
    raise typer.Exit(code)


@bench_verb("train")
def bench_train(
    words: Words = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", metavar="N", min=1, help="tokens per sequence; repeatable")
    ] = None,
    tokens: Tokens = None,
    steps: Steps = None,
    warmup: Warmup = None,
    with_data: Annotated[bool, typer.Option("--with-data", help="also with the loader, from prepared shards")] = False,
) -> None:
    """Measure tokens/s, MFU, step times and memory of the training step, for NSA and its dense twin.

    Example: tamis bench train configs/m7c_125m_80g.yaml --length 2048 --length 8192
    """
    resolved = resolve(words)
    loading_torch()
    from tamis.bench.sizes import default_sizes
    from tamis.bench.train import measure_training

    sizes = default_sizes(resolved.runtime.device, lengths, tokens, steps, warmup)
    warmup = sizes.warmup if warmup is None else warmup
    with announced(f"measuring training steps of {resolved.model.name}"):
        document = measure_training(
            resolved, lengths or list(sizes.lengths), tokens or sizes.tokens, steps or sizes.steps, warmup, with_data
        )
    _print_document(document)


@bench_verb("decode")
def bench_decode(
    batches: Annotated[
        list[int] | None, typer.Option("--batch", metavar="N", min=1, help="sequences; repeatable")
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", metavar="N", min=1, help="tokens in the cache; repeatable")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="timings per row")] = 30,
    with_model: Annotated[bool, typer.Option("--with-model", help="also a step of the whole model")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Measure decoding one token from the caches: latency, tokens/s, keys read. Also in artifacts/bench/.

    Example: tamis bench decode --batch 1 --batch 8 --length 65536
    """
    loading_torch()
    from tamis.bench.decode import measure_decoding
    from tamis.bench.document import exit_code
    from tamis.bench.sizes import default_sizes

    sizes = default_sizes(device, batches, lengths)
    batches, lengths = batches or list(sizes.batches), lengths or list(sizes.cached)
    with announced("measuring decoding"):
        document = measure_decoding(batches, lengths, repeats=repeats, with_model=with_model, device=device)
    raise typer.Exit(exit_code(document))


@bench_verb("needle")
def bench_needle(
    lengths: Annotated[
        list[int] | None, typer.Option("--length", metavar="N", min=1, help="tokens of a text; repeatable")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME", help="single, keys, values, tracking-2, tracking-4, common; repeatable"),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="layers of both models")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="training steps")] = None,
    seed: Annotated[int, typer.Option(help="of weights and texts")] = 0,
    device: Annotated[str, typer.Option(help="cpu: a miniature; cuda: texts of up to 65,536 tokens")] = "cpu",
) -> None:
    """Train a small model and its dense twin to find facts in long texts; accuracy by task, length and depth.

    The tasks are of RULER's kind: one needle, several keys, several values, variable tracking, common words. Then each
    branch of NSA is disabled in turn. Also in artifacts/bench/needle.json.

    Examples:

      tamis bench needle --task keys --steps 300

      tamis bench needle --device cuda
    """
    loading_torch()
    from tamis.bench.needle import LARGE, NeedleSettings, measure_needle

    default = LARGE if device.startswith("cuda") else NeedleSettings()
    chosen = replace(default, layers=layers, steps=steps or default.steps, seed=seed, only=tuple(tasks or ()))
    if lengths:
        chosen = replace(chosen, lengths=tuple(lengths), shown=())
    with announced(f"training two models on {chosen.steps} batches of texts"):
        measure_needle(chosen, device=device)


@bench_verb("positions")
def bench_positions(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="checkpoint_step{N}.pt, a run's directory, or an exported folder"),
    ],
    scales: Annotated[list[float] | None, typer.Option("--scale", metavar="X", help="rope scales; repeatable")] = None,
    reach: Annotated[int, typer.Option(min=1, help="how many trained lengths to read")] = 4,
    sequences: Annotated[int, typer.Option(min=1, help="held-out sequences")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Measure perplexity of held-out text by position, beyond the trained length, for several position scales.

    Example: tamis bench positions artifacts/train_showcase --scale 1 --scale 2
    """
    loading_torch()
    from tamis.bench.positions import measure_positions

    with announced("reading held-out text"):
        measure_positions(checkpoint, scales or (1.0, 2.0, 4.0), reach, sequences, device=device)


def _print_document(document: dict[str, Any]) -> None:
    from tamis.bench.document import exit_code

    print(json.dumps(document))
    raise typer.Exit(exit_code(document))
