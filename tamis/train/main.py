"""What python or torchrun starts: opens a session in announced stages, trains, and turns every end into its exit code.

python -m tamis.train.main --config configs/train_showcase.yaml train.steps=100
torchrun --nproc_per_node=2 -m tamis.train.main --config OUT/config.yaml --resume auto
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tamis.attention.functional import describe
from tamis.config import Config, ConfigError, load_config
from tamis.config.size import flops_per_token, parameter_count
from tamis.data import DataError, EndOfData
from tamis.run.files.directory import RunDirectory
from tamis.run.files.environment import describe_environment
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.hardware import read_gpus
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.lock import RunLocked
from tamis.run.files.manifest import DamagedCheckpoint, latest_valid_checkpoint, remove_leftovers, require_valid
from tamis.run.files.records import write_json_atomic, write_text_atomic
from tamis.run.worker.signals import is_supervised
from tamis.train.distributed import Workers, device_name, join
from tamis.train.guards import Anomaly
from tamis.train.loop import train
from tamis.train.memory import out_of_memory_advice
from tamis.train.settings import apply_settings
from tamis.train.step import COMPUTE_DTYPE
from tamis.train.trainer import Session

ALL_END_TOGETHER = (ExitCode.DONE, ExitCode.HALTED, ExitCode.PREEMPTED)
STAYS_ENDED = (ExitCode.USAGE, ExitCode.HALTED, ExitCode.ANOMALY)  # not PREEMPTED: torchrun sends TERM to regroup


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tamis.train.main", description=__doc__)
    parser.add_argument("--config", help="YAML file; keys not in it keep their defaults")
    parser.add_argument("--resume", help="a checkpoint file, or auto for the newest valid one in train.out_dir")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        return train_config(load_config(arguments.config, arguments.overrides), arguments.resume)
    except (ConfigError, RunLocked) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USAGE


def train_config(config: Config, resume: str | None = None) -> int:
    """Train to the end of the configuration, in this process as one of torchrun's or alone; returns the exit code."""
    started = time.time()
    _require_gpu_for_production(config)
    if (problem := _problem_with(resume)) is not None:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return ExitCode.USAGE
    RunDirectory(config.train.out_dir).create()  # what cannot be a directory is told before anything slow
    with join(config) as workers:
        if (ended := _end_before_restart(RunDirectory(config.train.out_dir), workers)) is not None:
            return ended
        code = _train_or_explain(Session(config, workers), resume, started)
        if code not in ALL_END_TOGETHER:
            workers.leave_at_once(code)
        return code


def _train_or_explain(session: Session, resume: str | None, started: float) -> int:
    """The exit code of the training; whatever ended it early has been told and recorded."""
    try:
        return _train(session, resume, started)
    except (ConfigError, DamagedCheckpoint) as error:
        return _failed(session, ExitCode.USAGE, str(error))
    except DataError as error:
        lasting = isinstance(error, EndOfData)
        return _failed(session, ExitCode.DATA_FAILURE, f"the data failed: {error}", lasting)
    except Anomaly as anomaly:
        write_text_atomic(session.run.anomaly, f"{anomaly.kind}\n{anomaly}\n")
        return _failed(session, ExitCode.ANOMALY, f"{anomaly}; nothing was saved since")
    except torch.OutOfMemoryError:
        session.memory_dumps.write("out_of_memory", session.step + 1)
        return _failed(session, ExitCode.CRASH, out_of_memory_advice(session.config, session.workers.device))
    except Exception:
        if session.workers.world_size == 1:
            raise
        traceback.print_exc()
        return ExitCode.CRASH
    finally:
        session.leave()


def _problem_with(resume: str | None) -> str | None:
    """Why this cannot be resumed from; a mistyped path is found before anything of the run's directory is touched."""
    if resume is None or resume == "auto":
        return None
    path = Path(resume)
    if path.exists() and path.with_suffix(".json").exists():
        return None  # its bytes are checked when it is loaded
    if path.is_dir() and (newest := latest_valid_checkpoint(path)) is not None:
        return f"--resume {path} is a directory: give {RunDirectory(path).checkpoint(newest)}, or auto"
    try:
        require_valid(path)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def _require_gpu_for_production(config: Config) -> None:
    """A production run that would quietly use the processor is a mistake, and takes weeks to notice."""
    if config.runtime.production and config.runtime.device == "auto" and not torch.cuda.is_available():
        raise ConfigError(
            "runtime.production is true and no usable GPU was found: check nvidia-smi and the driver, or set "
            "runtime.device=cpu if the processor is meant"
        )


def _end_before_restart(run: RunDirectory, workers: Workers) -> int | None:
    """torchrun's elastic restarts also restart workers that were told to stop, or cannot go on: they end again.

    Machines count their restarts apart. A halted run ends with 0 now, lest torchrun try yet again.
    """
    last = read_heartbeats(run.heartbeat(0), tail=1) if workers.is_main else []
    stays_ended = bool(last) and (last[-1].exit_code in STAYS_ENDED or last[-1].lasting is True)
    own = [int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), last[-1].exit_code if stays_ended else None]
    of_rank = workers.gather(own)
    code = of_rank[0][1]
    if max(restarts for restarts, _ in of_rank) == 0 or code is None:
        return None
    print(
        f"[tamis] rank {workers.rank}: the run had ended (exit code {code}); a restart does not change that", flush=True
    )
    return 0 if code == ExitCode.HALTED else int(code)


def _train(session: Session, resume: str | None, started: float) -> int:
    _announce(session)
    if session.workers.is_main:
        _prepare_directory(session, started)
    # Chosen by one rank for all: each looking for itself could see another newest.
    chosen = _checkpoint_to_resume(session.run, resume) if session.workers.is_main else None
    session.open(session.workers.gather(chosen)[0])
    code = train(session)
    if session.workers.is_main:
        write_json_atomic(session.run.metrics_json, _metrics(session, code, started))
        end = "done" if code == ExitCode.DONE else "stopped"
        session.progress.say(f"[tamis] {end} at step {session.step}; everything is in {session.run.path}")
    session.loader.close()
    return code


def _announce(session: Session) -> None:
    """The truth about what is about to run, before anything slow."""
    config, workers, say = session.config, session.workers, session.progress.say
    model, train, tokens = config.model, config.train, config.tokens_per_step(workers.world_size)
    say(
        f"[tamis] model {model.name}: {parameter_count(config):,} parameters, {model.attention} attention, "
        f"{model.n_layers} layers, dim {model.dim}, {flops_per_token(config) / 1e6:,.0f} MFLOP per trained token"
    )
    say(f"[tamis] {workers.world_size} × {device_name(workers.device)}, {config.runtime.precision} compute")
    say(
        f"[tamis] {train.steps:,} steps of {tokens:,} tokens, {train.steps * tokens:,} in all; "
        f"lr {train.lr:g} after {train.warmup_steps:,} warm-up steps; config {config.hash}"
    )
    say(f"[tamis] {describe(workers.device, COMPUTE_DTYPE[config.runtime.precision], model.d_k)}")
    for line in apply_settings(config, workers.device):
        say(f"[tamis] {line}")


def _prepare_directory(session: Session, started: float) -> None:
    run = session.run
    if not is_supervised() and (stale := HaltFile(run.halt).discard_stale(started)):
        session.progress.say(f"[tamis] {stale}")
    remove_leftovers(run)
    run.anomaly.unlink(missing_ok=True)
    write_text_atomic(run.config_yaml, session.config.to_yaml())
    write_json_atomic(run.env_json, describe_environment(read_gpus()))


def _checkpoint_to_resume(run: RunDirectory, resume: str | None) -> str | None:
    """An explicit file is used or refused; `auto` takes the newest valid one, if there is any."""
    if resume != "auto":
        return resume or None
    step = latest_valid_checkpoint(run)
    return str(run.checkpoint(step)) if step is not None else None


def _failed(session: Session, code: ExitCode, message: str, lasting: bool = False) -> int:
    """Every rank says why it ends; the main one also names the checkpoint to go on from."""
    session.telemetry.beat("failed", session.step, exit_code=int(code), lasting=lasting or None, detail=message)
    session.progress.say(f"[tamis] {_last_good(session.run)}")
    who = f" on rank {session.workers.rank}" if session.workers.world_size > 1 else ""
    print(f"error{who}: {message}", file=sys.stderr, flush=True)
    return code


def _last_good(run: RunDirectory) -> str:
    step = latest_valid_checkpoint(run)
    return f"Last good checkpoint: {run.checkpoint(step)}" if step is not None else "There is no checkpoint yet."


def _metrics(session: Session, code: int, started: float) -> dict[str, Any]:
    config = session.config
    return {
        "model": config.model.name,
        "attention": config.model.attention,
        "parameters": parameter_count(config),
        "config_hash": config.hash,
        "data": session.loader.description,
        "is_synthetic": session.loader.is_synthetic,
        "device": device_name(session.workers.device),
        "world_size": session.workers.world_size,
        "exit_code": int(code),
        "steps_done": session.step,
        "tokens_seen": session.step * config.tokens_per_step(session.workers.world_size),
        "seconds": round(time.time() - started, 1),
        **session.telemetry.final,
    }


if __name__ == "__main__":
    sys.exit(main())
