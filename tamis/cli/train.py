"""Verbs that train: run, train, launch, halt, restore."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.common import (
    TRAIN,
    RunDir,
    Tokenizer,
    Verb,
    Words,
    loading_torch,
    resolve,
    split,
    tokenizer_override,
)
from tamis.config import ConfigError, load_config
from tamis.config.legacy import variable_overrides
from tamis.config.schema import LOCAL
from tamis.run.files.console import say
from tamis.run.files.hardware import read_gpus
from tamis.run.plan import choose_config

app = typer.Typer()
verb = partial(app.command, cls=Verb, rich_help_panel=TRAIN)

SMALL_TEXT_BYTES = 16 << 20  # more surely has text to hold out

Detach = Annotated[bool, typer.Option("--detach", help="run in the background; the terminal may close")]


@verb()
def run(
    words: Words = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", help="your own text, JSONL or parquet files, or token shards; several as PATH=WEIGHT"
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    copy_url: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="first bring back the newest copy in this copy.to")
    ] = None,
    detach: Detach = False,
) -> None:
    """Run the whole job: look at the machine, smoke test, train under supervision, resume, hand over.

    The GPUs decide the config when none is given; without a GPU the embedded showcase runs on the CPU.

    Examples:

      tamis run

      tamis run --data my_texts/

      tamis run --data my_texts=0.3 --data sample=0.7

      tamis run configs/m7c_125m_80g.yaml --data shards/ --detach

      tamis run configs/m7c_125m_80g.yaml copy.to=me@nas:runs/m7c

      tamis run --from me@nas:runs/m7c
    """
    from tamis.run.launch import main_job

    path, own = split(words)
    own += tokenizer_override(tokenizer)
    overrides = [*(_data_overrides(data) if data else []), *own]  # the user's own keys come last and win
    if data and not any(word.startswith("data.val_fraction=") for word in own):
        overrides += _validation_override(path, overrides)
    raise typer.Exit(main_job(path, overrides, detach, copy_url))


def _data_overrides(given: list[str]) -> list[str]:
    """Keys to train on the user's own files into a directory named after them."""
    sources = dict(map(_weighted, given))
    name = "_".join(re.sub(r"[^\w.-]+", "_", Path(path).resolve().stem).strip("._-") for path in sources) or "data"
    keys = ["data.epochs=null", f"train.out_dir=artifacts/{name}"]
    tokenizers = {tokenizer for path in sources if (tokenizer := _tokenizer_of(path))}
    if len(tokenizers) > 1:
        raise ConfigError(f"--data: the shards have different tokenizers: {', '.join(sorted(tokenizers))}")
    keys += [f"data.tokenizer={json.dumps(tokenizer)}" for tokenizer in tokenizers]
    if len(sources) > 1 or not tokenizers:
        keys += ["data.val_fraction=0.05", "train.sample_prompt=null"]  # shards hold their own share
    if len(sources) > 1:
        return [*keys, "data.dataset=mixture", f"data.mixture={json.dumps(sources)}"]
    (path,) = sources
    return [*keys, f"data.dataset={'shards' if tokenizers else 'local'}", f"data.local_path={json.dumps(path)}"]


def _validation_override(path: str | None, overrides: list[str]) -> list[str]:
    """Train a text that is too small to hold some of it out without validation, instead of failing at the first."""
    from tamis.data import EndOfData, validation_batches
    from tamis.data.local_files import LocalFiles

    gpus = read_gpus()
    variables = variable_overrides(os.environ)[0]
    config = load_config(path or choose_config(gpus), overrides, variables)
    if config.data.dataset not in LOCAL or sum(LocalFiles(str(config.data.local_path)).sizes) > SMALL_TEXT_BYTES:
        return []
    try:
        validation_batches(config, world_size=max(1, len(gpus)))
    except EndOfData:
        say("there is too little text to hold some of it out: training goes without validation (data.val_fraction=0)")
        return ["data.val_fraction=0"]
    return []


def _weighted(given: str) -> tuple[str, float]:
    """The path and weight of PATH or PATH=WEIGHT; a path that exists may itself hold a `=`."""
    path, equals, weight = given.rpartition("=")
    if not equals or Path(given).exists():
        return given, 1.0
    try:
        return path, float(weight)
    except ValueError:
        raise ConfigError(f"--data {given}: the weight {weight!r} is not a number, as in --data PATH=0.5") from None


def _tokenizer_of(path: str) -> str | None:
    """The tokenizer of a folder of shards; None for text. A path without data is refused before anything starts."""
    from tamis.data.errors import DataError
    from tamis.data.local_files import LocalFiles
    from tamis.data.mixture import BY_NAME
    from tamis.data.shards import MANIFEST, read_shard_manifest, tokenizer_of_shards

    if (Path(path) / MANIFEST).is_file():
        return tokenizer_of_shards(Path(path), read_shard_manifest(Path(path)))
    if path not in BY_NAME:
        try:
            LocalFiles(path)
        except DataError as error:
            raise DataError(str(error).replace("data.local_path", "--data", 1)) from None
    return None


@verb()
def train(
    words: Words = None,
    resume: Annotated[str | None, typer.Option(help="a checkpoint file, or auto for the newest valid one")] = None,
) -> None:
    """Train in this process (or as one of torchrun's), unsupervised.

    The GPUs decide the config when none is given, as for `tamis run`.

    Examples:

      tamis train configs/train_showcase.yaml

      tamis train configs/m7c_125m_80g.yaml train.steps=1000 --resume auto
    """
    resolved = resolve(words)
    loading_torch()
    from tamis.train.main import train_config

    raise typer.Exit(train_config(resolved, resume))


@verb()
def launch(
    words: Words = None,
    phases: Annotated[bool, typer.Option("--phases", help="preflight, then phases 0 to 3 with go/no-go")] = False,
    phase_steps: Annotated[
        str | None, typer.Option(metavar="N,N,N,N", help="step counts of phases 0 to 3, for a rehearsal")
    ] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="also repeat phases that passed unchanged")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="workers; by default one per GPU")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="restarts after crashes and stalls")] = 10,
    detach: Detach = False,
) -> None:
    """Train under supervision: watched, restarted from the newest valid checkpoint, halted by .HALT.

    With --phases: preflight, one synthetic step, 300 and 1000 steps, then the run itself.
    Each phase is judged from the files it left, and one that fails stops the launch with the reason.
    The same command again continues where it stopped.

    The GPUs decide the config when none is given, as for `tamis run`.

    Examples:

      tamis launch configs/m7c_125m_80g.yaml --detach

      tamis launch configs/m7c_125m_2xa100_production.yaml --phases

      tamis launch configs/train_showcase.yaml --phases --phase-steps 1,20,30,60 train.out_dir=artifacts/rehearsal
    """
    from tamis.run.launch import launch_detached, launch_once, launch_phases, prepare_job
    from tamis.run.phases import parse_phase_steps, production_config

    if (phase_steps or repeat) and not phases:
        raise ConfigError("--phase-steps and --repeat need --phases: give --phases too")
    config = resolve(words)
    steps = parse_phase_steps(phase_steps) if phase_steps else None
    if detach:
        again = [word for word in sys.argv[1:] if word != "--detach"]
        raise typer.Exit(launch_detached(production_config(config, steps), again))
    job = prepare_job(config, split(words)[0], processes, restarts)
    raise typer.Exit(launch_phases(job, steps, repeat) if phases else launch_once(job))


@verb()
def halt(
    run: RunDir,
    reason: Annotated[str, typer.Option(help="written to .HALT and to the log")] = "requested by tamis halt",
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait until the run has stopped; 0: do not")] = 120.0,
) -> None:
    """Stop a run at the next step boundary, with a checkpoint, and wait until it has.

    Example: tamis halt artifacts/m7c_125m_2xa100_prod --reason "moving to another machine"
    """
    from tamis.run.files.halt import halt_run
    from tamis.run.locate import existing_run

    raise typer.Exit(halt_run(existing_run(run), reason, wait))


@verb()
def restore(
    folder: Annotated[Path, typer.Argument(metavar="OUT/earlier_TIME", help="the folder of a run to bring back")],
) -> None:
    """Bring back checkpoints that a start from an earlier step set aside.

    Example: tamis restore artifacts/m7c_125m/earlier_20261116_013912
    """
    from tamis.run.files.earlier import restore_earlier

    say(restore_earlier(folder))
