"""What the verbs share: their panels, the words that name a configuration, and how these become one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from tamis import __version__
from tamis.config import Config, ConfigError, known_keys, load_config
from tamis.config.legacy import variable_overrides
from tamis.run.files.hardware import read_gpus
from tamis.run.plan import choose_config

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG|SECTION.KEY=VALUE",
        help="a YAML file (else $CONFIG), and changes to single keys, as train.steps=100",
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="a run's directory, its train.out_dir")]

TRAIN, WATCH, CHECK, USE, MEASURE = "Train", "Watch and hand over", "Check", "Use the model", "Measure"


def resolve(words: list[str] | None, default: str | None = None) -> Config:
    """The config file ($CONFIG, then `default`, when none is given), then the variables, then single keys."""
    path, overrides = split(words)
    from_variables, effects = variable_overrides(os.environ)
    for effect in effects:
        print(f"[tamis] {effect}", flush=True)
    config = load_config(path or default, [*from_variables, *overrides])
    if path is None:
        chosen = default or f"the built-in defaults, {config.model.name}"
        print(f"[tamis] no config was named, so this is {chosen}", file=sys.stderr, flush=True)
    return config


def resolve_for_this_machine(words: list[str] | None) -> Config:
    """The same; where no file is named, the one that `tamis run` would choose here."""
    return resolve(words, split(words)[0] or choose_config(read_gpus()))


def split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """The config file, $CONFIG when none is given, and the single keys."""
    files = [word for word in words or [] if "=" not in word]
    if key := next((word for word in files if word in known_keys()), None):
        raise ConfigError(f"{key} is a key of the config: write {key}=VALUE")
    if len(files) > 1:
        raise ConfigError(f"one config file at most, got {', '.join(files)}")
    return files[0] if files else os.environ.get("CONFIG") or None, [word for word in words or [] if "=" in word]


def loading_torch(stream: TextIO | None = None) -> None:
    """The first line within a second: loading torch takes several."""
    print(f"[tamis] {__version__}: loading torch …", file=stream, flush=True)
