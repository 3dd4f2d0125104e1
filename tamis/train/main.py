"""The entry of a worker, started by python or torchrun: trains a configuration and returns the exit code.

python -m tamis.train.main --config configs/train_showcase.yaml train.steps=100
torchrun --nproc_per_node=2 -m tamis.train.main --config OUT/config.yaml --resume auto
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tamis.config.process import set_process_defaults
from tamis.train.tools.early_compile import parse_arguments, start_compiling

if __name__ == "__main__":
    set_process_defaults()  # before torch loads
    start_compiling(sys.argv[1:])
    gc.disable()  # a quarter of the time of the imports, which make no garbage

import psutil
import torch

from tamis.attention.functional import describe
from tamis.checkpoint.file import require_same_model, saved_config
from tamis.config import Config, ConfigError, load_config
from tamis.config.size import flops_per_token, parameter_count, require_memory
from tamis.data import DataError, EndOfData, tokenizer_for
from tamis.model import DTYPES
from tamis.run.files.console import discard_unwritable_output, say, write
from tamis.run.files.directory import DirectoryReplaced, RunDirectory
from tamis.run.files.environment import describe_environment
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.hardware import read_gpus
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.identity import is_finished, require_same_run
from tamis.run.files.lock import RunLocked
from tamis.run.files.manifest import (
    DamagedCheckpoint,
    checkpoint_to_resume,
    damage,
    latest_valid_checkpoint,
    read_manifest,
    remove_leftovers,
    require_valid,
)
from tamis.run.files.records import write_json_atomic, write_text_atomic
from tamis.run.worker.signals import is_supervised
from tamis.train.console import Console
from tamis.train.distributed import Ranks, choose_device, device_name, join, settings_without_effect
from tamis.train.guards import Anomaly
from tamis.train.memory import out_of_memory_advice
from tamis.train.settings import apply_settings
from tamis.train.trainer import Trainer

ALL_END_TOGETHER = (ExitCode.DONE, ExitCode.HALTED, ExitCode.PREEMPTED)
STAYS_ENDED = (ExitCode.USAGE, ExitCode.HALTED, ExitCode.ANOMALY)  # not PREEMPTED: torchrun sends TERM to regroup


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        _load_compiler(config)
        return train_config(config, arguments.resume)
    except (ConfigError, RunLocked) as error:
        Console().error(str(error))
        return ExitCode.USAGE


def _load_compiler(config: Config) -> None:
    """Import what compiles the step on a GPU, and what DDP imports; a thread creates the CUDA context meanwhile."""
    on_gpu = torch.backends.cuda.is_built() and config.runtime.device != "cpu"
    if on_gpu:
        threading.Thread(target=_create_context, args=[config], daemon=True).start()
    if on_gpu or os.environ.get("WORLD_SIZE", "1") != "1":
        gc.disable()  # imports make no garbage
        importlib.import_module("torch._dynamo")
        gc.freeze()
        gc.enable()


def _create_context(config: Config) -> None:
    with contextlib.suppress(Exception):  # whatever fails here fails again in `join`, with its message
        device = choose_device(config, int(os.environ.get("LOCAL_RANK", 0)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def train_config(config: Config, resume: str | None = None) -> int:
    """Train `config` in this process, alone or as one of torchrun's ranks; returns the exit code."""
    started = time.time()
    config = config.with_steps(int(os.environ.get("WORLD_SIZE", 1)))
    _require_usable_gpus(config)
    require_same_run(RunDirectory(config.train.out_dir), config)  # before anything in the directory changes
    if (problem := _problem_with(resume, config)) is not None:
        Console().error(problem)
        return ExitCode.USAGE
    RunDirectory(config.train.out_dir).create()  # a path that cannot be a directory is refused before anything slow
    with join(config) as ranks:
        require_memory(config, *_memory_of(ranks), ranks.world_size)
        if (ended := _end_before_restart(RunDirectory(config.train.out_dir), ranks)) is not None:
            return ended
        code = _train_or_explain(Trainer(config, ranks), resume, started)
        if code not in ALL_END_TOGETHER:
            ranks.exit_at_once(code)
        # A torchrun started by hand restarts any other code, or ends in a traceback; the heartbeat keeps the real one.
        return 0 if code == ExitCode.HALTED and _is_under_torchrun_alone() else code


def _train_or_explain(trainer: Trainer, resume: str | None, started: float) -> int:
    """Train and return the exit code; an early end is explained on stderr and in the heartbeat."""
    try:
        return _train(trainer, resume, started)
    except (ConfigError, DamagedCheckpoint) as error:
        return _failed(trainer, ExitCode.USAGE, str(error))
    except DirectoryReplaced as error:
        trainer.telemetry.beat("failed", trainer.step, exit_code=int(ExitCode.USAGE), detail=str(error))
        trainer.console.error(str(error))
        return ExitCode.USAGE
    except DataError as error:
        lasting = isinstance(error, EndOfData)
        return _failed(trainer, ExitCode.DATA_FAILURE, f"the data failed: {error}", lasting)
    except Anomaly as anomaly:
        with contextlib.suppress(OSError):
            write_text_atomic(trainer.run.anomaly, f"{anomaly.kind}\n{anomaly}\n")
        return _failed(trainer, ExitCode.ANOMALY, f"{anomaly}; nothing was saved since")
    except torch.OutOfMemoryError:
        trainer.memory_dumps.write("out_of_memory", trainer.step + 1)
        return _failed(trainer, ExitCode.CRASH, out_of_memory_advice(trainer.config, trainer.ranks.device))
    except Exception:
        if trainer.ranks.world_size == 1:
            raise
        write(traceback.format_exc(), sys.stderr)
        return ExitCode.CRASH
    finally:
        trainer.close()


def _is_under_torchrun_alone() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and not is_supervised()


def _problem_with(resume: str | None, config: Config) -> str | None:
    """Return why `resume` cannot be used, or None; checked before anything in the run directory changes."""
    run = RunDirectory(config.train.out_dir)
    if resume is None:
        return None
    path = run.checkpoint(max(run.checkpoints(), default=0)) if resume == "auto" else Path(resume)
    if path.exists() and path.with_suffix(".json").exists():  # its bytes are checked when it is loaded
        if (saved := saved_config(path)) is not None:
            require_same_model(path, saved, config)
        return _nothing_to_do(run, path, config.train.steps)
    if resume == "auto":
        return None
    if path.is_dir() and (newest := latest_valid_checkpoint(path)) is not None:
        return f"--resume {path} is a directory: give {RunDirectory(path).checkpoint(newest)}, or auto"
    try:
        require_valid(path)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def _nothing_to_do(run: RunDirectory, checkpoint: Path, steps: int) -> str | None:
    """Return a sentence if a valid checkpoint leaves neither a step nor a record to do."""
    with contextlib.suppress(ValueError):  # an odd manifest is explained when the checkpoint is loaded
        step = read_manifest(manifest := checkpoint.with_suffix(".json"))["step"]
        is_over = step > steps or (step == steps and is_finished(run, step))
        if is_over and damage(manifest) is None:
            return f"{checkpoint} is at step {step}, and train.steps is {steps}: nothing to do. Raise train.steps"
    return None


def _require_usable_gpus(config: Config) -> None:
    """Refuse to train on the CPU by mistake: in production, or where NVML lists GPUs that torch cannot use."""
    if config.runtime.device != "auto" or torch.cuda.is_available():
        return
    gpus = read_gpus()
    if gpus:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        raise ConfigError(
            f"this machine has {len(gpus)} × {gpus[0].name} (driver {gpus[0].driver}), and torch {torch.__version__}, "
            f"built for {built}, cannot use them: install a torch build for this driver or a newer driver, or set "
            "runtime.device=cpu if the processor is meant"
        )
    if config.runtime.production:
        raise ConfigError(
            "runtime.production is true and no usable GPU was found: check nvidia-smi and the driver, or set "
            "runtime.device=cpu if the processor is meant"
        )


def _memory_of(ranks: Ranks) -> tuple[int, str]:
    """Bytes of the memory that this rank trains in, and its name."""
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_properties(ranks.device).total_memory, device_name(ranks.device)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return psutil.virtual_memory().total // local_processes, "this machine per process"


def _end_before_restart(run: RunDirectory, ranks: Ranks) -> int | None:
    """Return the exit code of a run that had ended, when torchrun restarts it anyway; None to go on.

    Each machine counts its own restarts. A halted run returns 0, so that torchrun does not restart it again.
    """
    last = read_heartbeats(run.heartbeat(0), tail=1) if ranks.is_main else []
    stays_ended = bool(last) and (last[-1].exit_code in STAYS_ENDED or last[-1].lasting is True)
    own = [int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), last[-1].exit_code if stays_ended else None]
    of_rank = ranks.gather(own)
    code = of_rank[0][1]
    if max(restarts for restarts, _ in of_rank) == 0 or code is None:
        return None
    Console().say(f"rank {ranks.rank}: the run had ended (exit code {code}); a restart does not change that")
    return 0 if code == ExitCode.HALTED else int(code)


def _train(trainer: Trainer, resume: str | None, started: float) -> int:
    _announce(trainer)
    ranks = trainer.ranks
    # Rank 0 chooses for all: on a shared disk two ranks could see different newest checkpoints.
    chosen = ranks.together(lambda: _path_to_resume(trainer.run, resume) if ranks.is_main else None)
    if ranks.is_main:
        _clear_leftovers(trainer, started)
    trainer.open(ranks.gather(chosen)[0])
    if ranks.is_main:  # only now: a refused start leaves the records of the run before as they were
        trainer.run.metrics_json.unlink(missing_ok=True)  # figures of an earlier end; `is_finished` relies on it
        write_text_atomic(trainer.run.config_yaml, trainer.config.to_yaml())
        if (tokenizer := tokenizer_for(trainer.config.data.tokenizer)).file:
            shutil.copyfile(tokenizer.file, trainer.run.path / tokenizer.name)
        write_json_atomic(trainer.run.env_json, describe_environment(read_gpus()))
    code = trainer.train()
    if trainer.ranks.is_main:
        trainer.run.require_held()
        write_json_atomic(trainer.run.metrics_json, _metrics(trainer, code, started))
        end = "done" if code == ExitCode.DONE else "stopped"
        trainer.console.say(f"{end} at step {trainer.step}; everything is in {trainer.run.path}")
    trainer.loader.close()
    return code


def _announce(trainer: Trainer) -> None:
    """Print what is about to run, before anything slow."""
    config, ranks, say = trainer.config, trainer.ranks, trainer.console.say
    model, train, tokens = config.model, config.train, config.tokens_per_step(ranks.world_size)
    flops = f"{'up to ' * (config.data.packing == 'documents')}{flops_per_token(config) / 1e6:,.0f} MFLOP"
    say(
        f"model {model.name}: {parameter_count(config):,} parameters, {model.attention} attention, "
        f"{model.n_layers} layers, dim {model.dim}, {flops} per trained token"
    )
    say(f"{ranks.world_size} × {device_name(ranks.device)}, {config.runtime.precision} compute")
    if config.copy.to:  # a supervisor keeps it to itself
        say("copy.to has no effect without supervision: use tamis run or tamis launch")
    say(
        f"{train.steps:,} steps of {tokens:,} tokens, {train.steps * tokens:,} in all; "
        f"recipe {train.recipe}, {train.optimizer}, lr {train.lr:g} after {train.warmup_steps:,} warm-up steps; "
        f"config {config.hash}"
    )
    heads_per_group = model.n_heads // model.n_kv_groups
    say(describe(ranks.device, DTYPES[config.runtime.precision], model.d_k, heads_per_group))
    for line in [*apply_settings(config, ranks.device), *settings_without_effect(config, ranks)]:
        say(line)


def _clear_leftovers(trainer: Trainer, started: float) -> None:
    """Remove a stale `.HALT`, temporary files of killed saves, and the anomaly of an earlier attempt."""
    run = trainer.run
    if not is_supervised() and (stale := HaltFile(run.halt).discard_stale(started)):
        trainer.console.say(stale)
    remove_leftovers(run)
    run.anomaly.unlink(missing_ok=True)


def _path_to_resume(run: RunDirectory, resume: str | None) -> str | None:
    """Return an explicit file as it is; for `auto` the newest valid checkpoint, if there is one."""
    if resume != "auto":
        return resume or None
    step = checkpoint_to_resume(run, on_damaged=say)
    return None if step is None else str(run.checkpoint(step))


def _failed(trainer: Trainer, code: ExitCode, message: str, lasting: bool = False) -> int:
    """Record and print why this rank ends; rank 0 also names the checkpoint to resume from."""
    trainer.telemetry.beat("failed", trainer.step, exit_code=int(code), lasting=lasting or None, detail=message)
    trainer.console.say(_last_good(trainer.run))
    trainer.console.error(message)
    return code


def _last_good(run: RunDirectory) -> str:
    step = latest_valid_checkpoint(run, on_damaged=lambda problem: None)
    return f"Last good checkpoint: {run.checkpoint(step)}" if step is not None else "There is no checkpoint to resume."


def _metrics(trainer: Trainer, code: int, started: float) -> dict[str, Any]:
    config = trainer.config
    return {
        "model": config.model.name,
        "attention": config.model.attention,
        "parameters": parameter_count(config),
        "config_hash": config.hash,
        "data": trainer.loader.description,
        "is_synthetic": trainer.loader.is_synthetic,
        "device": device_name(trainer.ranks.device),
        "world_size": trainer.ranks.world_size,
        "exit_code": int(code),
        "steps_done": trainer.step,
        "tokens_seen": trainer.step * config.tokens_per_step(trainer.ranks.world_size),
        "seconds": round(time.time() - started, 1),
        **trainer.telemetry.final,
    }


if __name__ == "__main__":
    gc.freeze()  # no collection need look at what was imported; the one at the exit would take a second
    gc.enable()
    code = main()
    discard_unwritable_output()
    sys.exit(code)
