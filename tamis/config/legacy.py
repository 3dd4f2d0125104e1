"""The runbooks' environment variables and flags, mapped to config keys in one table. No torch.

Every variable that is set is printed with its effect; an unknown NSA_* name is an error. None of them can change what
attention computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tamis.config import Config, ConfigError, apply_override, build_config, load_config
from tamis.config.suggest import did_you_mean, nearest

DEFAULT_CONFIG = "configs/train_showcase.yaml"


@dataclass(frozen=True)
class Variable:
    """One variable: the key it sets, if any, what it does in a sentence, and how its text becomes the value."""

    key: str | None
    does: str
    value: Callable[[str], str | None] = str  # None: this text leaves the key as it is


def _switch(text: str) -> str:
    return {"1": "true", "0": "false"}.get(text, text)


def _inverted(text: str) -> str:
    return {"1": "false", "0": "true"}.get(text, text)


def _when_on(choice: str) -> Callable[[str], str | None]:
    return lambda text: choice if _switch(text) == "true" else None


def _compression(text: str) -> str:
    return {"0": "none", "": "none"}.get(text, text)


VARIABLES: dict[str, Variable] = {
    "NSA_PREFILL_BATCHED": Variable(None, "has nothing left to choose: there is one path, and it is batched"),
    "NSA_SEL_RANGES_V2": Variable(None, "has nothing left to choose: selection always runs on the device"),
    "NSA_DDP_COMPRESS": Variable("runtime.ddp_compress", "dtype of gradients between GPUs", _compression),
    "NSA_DDP_BUCKET_MB": Variable("runtime.ddp_bucket_mb", "size of DDP's gradient buckets, in MB"),
    "NSA_DDP_STATIC_GRAPH": Variable("runtime.ddp_static_graph", "DDP may rely on the same graph each step", _switch),
    "NSA_DDP_FIND_UNUSED": Variable("runtime.ddp_find_unused", "DDP searches for unused parameters", _switch),
    "NSA_DDP_DISABLE_GC": Variable("runtime.ddp_disable_gc", "no gradient checkpointing with several GPUs", _switch),
    "NSA_DDP_SAFE_MODE": Variable("runtime.ddp_safe_mode", "the plainest DDP settings", _switch),
    "NSA_DISABLE_AUX_STATS": Variable("train.aux_stats", "gate statistics off (1) or on (0)", _inverted),
    "NSA_TB_DISABLE": Variable("train.tensorboard", "TensorBoard off (1) or on (0)", _inverted),
    "NSA_DISABLE_CSV_LOGS": Variable("train.csv", "training.csv and val.csv off (1) or on (0)", _inverted),
    "NSA_ACCUM": Variable("train.accumulate_grad_batches", "micro-batches per optimizer step"),
    "NSA_LR": Variable("train.lr", "peak learning rate"),
    "NSA_MEM_DUMP_EVERY": Variable("runtime.mem_dump_every", "steps between memory snapshots"),
    "NSA_NVTX": Variable("runtime.nvtx", "NVTX ranges for a profiler", _switch),
    "NSA_SDPA_AUDIT": Variable("runtime.sdpa_audit", "print which attention kernels PyTorch may choose", _switch),
    "NSA_USE_FA2": Variable("runtime.use_flash", "dense twin: allow flash attention", _switch),
    "NSA_SDPA_NO_FLASH": Variable("runtime.sdpa", "dense twin: never flash attention", _when_on("no_flash")),
    "NSA_SDPA_FLASH_ONLY": Variable("runtime.sdpa", "dense twin: only flash attention", _when_on("flash_only")),
    "NSA_SCALER_INIT_SCALE": Variable("runtime.scaler_init_scale", "fp16: first loss scale"),
    "NSA_SCALER_GROWTH_INTERVAL": Variable("runtime.scaler_growth_interval", "fp16: steps until the scale grows"),
    "NSA_SCALER_GROWTH_FACTOR": Variable("runtime.scaler_growth_factor", "fp16: growth of the scale"),
    "NSA_SCALER_BACKOFF_FACTOR": Variable("runtime.scaler_backoff_factor", "fp16: shrinking after an overflow"),
}

PASSED_ON = {
    "CONFIG": "the config file, if none is named",
    "TORCH_NCCL_BLOCKING_WAIT": "PyTorch: a collective that times out raises an error",
    "PYTORCH_CUDA_ALLOC_CONF": "PyTorch: settings of the GPU memory allocator",
    "CUDA_LAUNCH_BLOCKING": "CUDA: wait for every kernel; slow, for finding errors",
    "HF_DATASETS_CACHE": "where streamed data is kept on disk, up to data.cache_gib",
}

FLAGS: dict[str, tuple[str, str]] = {  # flag → config key, help
    "--dataset": ("data.dataset", "synthetic, fineweb_edu, local, shards or sample"),
    "--steps": ("train.steps", "optimizer steps"),
    "--precision": ("runtime.precision", "bf16, fp16 or fp32"),
    "--loader-timeout": ("data.loader_timeout_s", "longest wait for one batch, in seconds"),
    "--local-path": ("data.local_path", "files or folder of text, or a folder of token shards"),
    "--seq-len": ("train.seq_len", "tokens per sequence"),
    "--batch-size": ("train.batch_size", "micro-batch per GPU, in sequences"),
    "--accum-batches": ("train.accumulate_grad_batches", "micro-batches per optimizer step"),
}


@dataclass(frozen=True)
class Request:
    """What the flags and variables of scripts/train_showcase.py ask for."""

    config: Config
    config_path: str
    resume: str | None
    save: str | None
    effects: list[str]  # one line per variable that is set


def parse(argv: list[str], environment: Mapping[str, str]) -> Request:
    """Resolve flags over variables over the config file that --config or CONFIG names."""
    arguments, unknown = _parser().parse_known_intermixed_args(argv)
    if unknown:
        raise ConfigError(
            f"unknown flag {unknown[0]}{did_you_mean(nearest(unknown[0], _flag_names()))}; --help lists them all"
        )
    config_path = arguments.config or environment.get("CONFIG") or DEFAULT_CONFIG
    from_variables, effects = variable_overrides(environment)
    config = load_config(config_path, [*_flag_overrides(arguments), *arguments.overrides], from_variables)
    _check_ddp(arguments.ddp, environment)
    if arguments.save is not None and not arguments.save.endswith(".pt"):
        raise ConfigError(f"--save {arguments.save} must end in .pt, as its manifest's name follows from it")
    return Request(config, config_path, arguments.resume, arguments.save, effects)


def variable_overrides(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """`section.key=value` for each NSA_* variable that is set, and a line with the effect of each set variable."""
    set_by: dict[str, tuple[str, str]] = {}  # key → variable and override
    effects = []
    for name, text in sorted(environment.items()):
        if name.startswith("NSA_"):
            key, value = _key_and_value(name, text)
            effects.append(f"{name}={text}: {_effect(VARIABLES[name], value)}")
            if key is not None and value is not None:
                override = f"{key}={value}"
                _check(name, text, override, set_by.get(key))
                set_by[key] = (name, override)
        elif name in PASSED_ON:
            effects.append(f"{name}={text}: {PASSED_ON[name]}")
        elif name.startswith("NCCL_") and name != "NCCL_VERSION":  # which CUDA images set, and NCCL does not read
            effects.append(f"{name}={text}: passed on to NCCL")
    return [override for _, override in set_by.values()], effects


def _key_and_value(name: str, text: str) -> tuple[str | None, str | None]:
    variable = VARIABLES.get(name)
    if variable is None:
        raise ConfigError(
            f"unknown variable {name}{did_you_mean(nearest(name, VARIABLES))}; docs/variables.md lists them all"
        )
    return variable.key, variable.value(text) if text or variable.value is _compression else None


def _check(name: str, text: str, override: str, before: tuple[str, str] | None) -> None:
    """Refuse a value the key cannot hold, or two variables that contradict each other, by the variable's name."""
    if before is not None and before[1] != override:
        raise ConfigError(f"{before[0]} and {name} contradict each other ({before[1]}, {override}): unset one")
    tree: dict[str, Any] = {}
    apply_override(tree, override)
    try:
        build_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{name}={text}: {error}") from None


def _effect(variable: Variable, value: str | None) -> str:
    if variable.key is None:
        return variable.does
    if value is None:
        return f"off, {variable.key} stays as configured"
    return f"{variable.key}={value} ({variable.does})"


class _Parser(argparse.ArgumentParser):
    """A parser that raises a ConfigError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help shows what there is)")


def _flag_names() -> list[str]:
    return [name for action in _parser()._actions for name in action.option_strings]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_showcase.py",
        description="Train a config file, with flags on top.",
        epilog="example: CONFIG=configs/m7c_125m_40g.yaml python scripts/train_showcase.py --dataset synthetic",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help=f"YAML file (default: $CONFIG, else {DEFAULT_CONFIG})")
    parser.add_argument("--resume", help="checkpoint file to resume from, or auto for the newest valid one")
    parser.add_argument("--save", metavar="PATH", help="copy the last checkpoint to PATH when training ends")
    parser.add_argument("--ddp", choices=("0", "1"), help="1: must run under torchrun; 0: must not")
    parser.add_argument("--no-gc", action="store_true", help="no gradient checkpointing")
    parser.add_argument(
        "--synthetic-on-fail", action="store_true", help="continue with random tokens if the data fails; marks the run"
    )
    for flag, (key, text) in FLAGS.items():
        parser.add_argument(flag, help=f"{text} ({key})")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="any other key")
    return parser


def _flag_overrides(arguments: argparse.Namespace) -> list[str]:
    given = ((key, getattr(arguments, flag.lstrip("-").replace("-", "_"))) for flag, (key, _) in FLAGS.items())
    overrides = [f"{key}={value}" for key, value in given if value is not None]
    if arguments.no_gc:
        overrides.append("runtime.gradient_checkpointing=false")
    if arguments.synthetic_on_fail:
        overrides.append("data.synthetic_on_fail=true")
    return overrides


def _check_ddp(wanted: str | None, environment: Mapping[str, str]) -> None:
    processes = int(environment.get("WORLD_SIZE", 1))
    if wanted == "0" and processes > 1:
        raise ConfigError(f"--ddp 0 asks for one process, but torchrun started {processes}: start it with python")
    if wanted == "1" and "RANK" not in environment:
        raise ConfigError(
            "--ddp 1 needs torchrun: torchrun --nproc_per_node=<GPUs> scripts/train_showcase.py … ; or use --ddp 0"
        )
