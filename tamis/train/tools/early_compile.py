"""Compile the kernels of a configuration in other processes while a worker imports torch, opens its data and builds.

A worker starts `python -m tamis.train.tools.early_compile` with its own arguments before it imports torch. That process
forks one for each core, and each compiles a part of the kernels that the worker is going to launch, into Triton's
cache. It uses no GPU. If a marker in the cache shows that all of it is done, the process ends before it imports
torch. Whatever goes wrong here costs nothing but time: the worker compiles what is missing.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tamis.config import Config, load_config
from tamis.config.process import set_process_defaults
from tamis.config.size import GIB

if TYPE_CHECKING:
    import torch

TAMIS = Path(__file__).parents[2]
GPU_DRIVER = Path("/dev/nvidiactl")
LEAST_CORES = 4  # with fewer, processes that compile keep the worker from its own work
MOST_PROCESSES = 16
PATIENCE_S = 60.0
_started: subprocess.Popen[bytes] | None = None


def start_compiling(argv: Sequence[str]) -> None:
    """Start the process for a worker with these arguments, if it is the first of a machine with a GPU."""
    global _started
    if not GPU_DRIVER.exists() or (os.cpu_count() or 1) < LEAST_CORES or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    command = [sys.executable, "-m", __name__, *argv]
    quiet = subprocess.DEVNULL
    _started = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    atexit.register(_stop)


def start_inductor(config: Config, device: torch.device) -> None:
    """Start the processes in which torch.compile compiles; until they are ready it compiles kernels one by one."""
    if config.runtime.compile and device.type == "cuda":
        with contextlib.suppress(ImportError, AttributeError):  # no public name of PyTorch
            from torch._inductor.async_compile import AsyncCompile

            AsyncCompile.use_process_pool()


def is_compiling() -> bool:
    return _started is not None and _started.poll() is None


def wait_until_compiled() -> None:
    """Wait for the process, but not forever."""
    if _started is not None:
        try:
            _started.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            _stop()


def _stop() -> None:
    if is_compiling():
        assert _started is not None
        _started.kill()
        _started.wait()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a worker, which this process takes too."""
    parser = argparse.ArgumentParser(prog="python -m tamis.train.main", description="Train a configuration.")
    parser.add_argument("--config", help="YAML file; keys not in it keep their defaults")
    parser.add_argument("--resume", help="a checkpoint file, or auto for the newest valid one in train.out_dir")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    return parser.parse_intermixed_args(argv)


def main() -> int:
    from tamis.run.files.hardware import read_capability, read_gpus

    set_process_defaults()
    arguments = parse_arguments(None)
    config = load_config(arguments.config, arguments.overrides)
    gpus = read_gpus()
    if config.runtime.device == "cpu" or not gpus:
        return 0
    name, capability = gpus[0].name, read_capability(gpus[0])
    marker = marker_of(config, name)
    if marker is not None and marker.exists():
        return 0
    from tamis.attention.kernels.ahead_of_time import compile_in_processes
    from tamis.attention.kernels.tuned import GpuModel

    gpu = GpuModel(name, capability)
    if not compile_in_processes(gpu, lambda: launch_kernels(config), processes_that_fit()):
        return 1
    if marker is not None:
        marker.touch()
    return 0


def marker_of(config: Config, gpu: str) -> Path | None:
    """Return the file that marks a configuration as compiled, by all the kernels depend on; None without a cache."""
    if (cache := os.environ.get("TRITON_CACHE_DIR")) is None:
        return None
    train, triton = config.train, find_spec("triton")
    sizes = (train.seq_len, train.length_schedule, train.batch_size, config.data.packing, config.runtime.precision)
    digest = hashlib.sha256(repr((gpu, config.model, config.nsa, sizes)).encode())
    sources = [Path(__file__), *TAMIS.glob("attention/**/*.py"), *TAMIS.glob("model/*.py")]
    if triton is not None and triton.origin is not None:
        sources.append(Path(triton.origin))  # has the version
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return Path(cache) / f"compiled-{digest.hexdigest()[:16]}"


def processes_that_fit() -> int:
    """How many processes may compile at once: a core is left free, and each takes up to half a GiB."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1, psutil.virtual_memory().available // GIB))


def launch_kernels(config: Config) -> None:
    """Launch what the proof before step 1 and the first step launch, on tensors without memory."""
    from tamis.attention import NSASpec
    from tamis.attention.kernels.ahead_of_time import launch_attention
    from tamis.attention.verify import length_like, packed_ends
    from tamis.data.loader import MEAN_TOKENS
    from tamis.model import DTYPES
    from tamis.train.tools.selfcheck import sequences_of, shorter_lengths

    model, train, spec = config.model, config.train, NSASpec.of(config.nsa)
    launch_layers(config)
    if "nsa" not in config.layer_kinds:
        return
    shape = (DTYPES[config.runtime.precision], model.n_heads, model.n_kv_groups, model.d_k, spec)
    proof = length_like(train.seq_len, model.n_heads, spec)
    launch_attention(*shape, proof)
    if config.data.packing == "documents":
        times = sequences_of(config, proof)
        of_proof = times * (len(packed_ends(proof)) - 1)
        launch_attention(*shape, times * proof, documents=of_proof, longest=train.seq_len)
    for length in (*shorter_lengths(config), train.seq_len):
        rows = sequences_of(config, length)
        if config.data.packing == "documents":
            documents = rows * (1 + length // MEAN_TOKENS[0])
            launch_attention(*shape, rows * length, documents=documents, longest=train.seq_len)
        else:
            launch_attention(*shape, length, rows)


def launch_layers(config: Config) -> None:
    """Launch the kernels around attention: norms, feed-forward, the cut into heads, the loss."""
    import torch

    from tamis.attention.kernels.split_heads import join_heads_rows, split_heads_rows
    from tamis.attention.layer import ROTATED, heads_of_parts, tokens_of_piece
    from tamis.attention.spec import NSASpec
    from tamis.model import DTYPES
    from tamis.model.loss import LOGITS_AT_ONCE, cross_entropy_rows_
    from tamis.model.norm import add_and_norm_rows, add_and_norm_rows_backward
    from tamis.model.swiglu import swiglu_rows, swiglu_rows_backward

    model, train = config.model, config.train
    batch, tokens = train.batch_size, train.seq_len
    if config.data.packing == "documents":
        batch, tokens = 1, batch * tokens
    with torch.device("meta"):
        like = torch.empty(0, dtype=DTYPES[config.runtime.precision])
        x, weight = like.new_empty(batch * tokens, model.dim), torch.empty(model.dim)
        total, _, inverse = add_and_norm_rows._init_fn(x, x, weight, model.norm_eps)
        for d_total in (x, None):
            add_and_norm_rows_backward._init_fn(d_total, x, total, inverse, weight)
        if model.mlp == "swiglu":
            merged = like.new_empty(batch * tokens, 2 * model.d_ff)
            swiglu_rows_backward._init_fn(swiglu_rows(merged), merged)
        sizes = heads_of_parts(model.n_heads, model.n_kv_groups, model.d_k)
        angles = torch.empty(tokens, model.d_k // 2)
        heads = like.new_empty(batch, tokens, sum(sizes), model.d_k)
        piece = 0 if config.data.packing == "documents" else tokens_of_piece(tokens, NSASpec.of(config.nsa))
        how = angles, angles, sizes, ROTATED, piece
        join_heads_rows(split_heads_rows(heads, *how), *how)
        rows = min(batch * tokens, max(1, LOGITS_AT_ONCE["cuda"] // config.vocab_size))
        logits, targets = like.new_empty(rows, config.padded_vocab_size), torch.empty(rows, dtype=torch.int64)
        cross_entropy_rows_(logits, targets, config.vocab_size, True, model.logit_soft_cap)


if __name__ == "__main__":
    sys.exit(main())
