"""What the verbs share: help panels, and the arguments that name a configuration."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from tamis import __version__
from tamis.config import Config, ConfigError, known_keys, load_config
from tamis.config.legacy import variable_overrides
from tamis.run.files.console import say
from tamis.run.files.hardware import read_gpus
from tamis.run.plan import choose_config

TRAIN, WATCH, CHECK, USE, MEASURE = "Train", "Watch and hand over", "Check", "Use the model", "Measure"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG|SECTION.KEY=VALUE",
        help="a YAML file (else $CONFIG), and changes to single keys, as train.steps=100",
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="gpt2, byte, a tokenizer.json or its folder, or .tiktoken ranks")
]
# For the processes that `tamis check` and `tamis run` start: their file already contains what variables set.
Resolved = Annotated[bool, typer.Option("--resolved", hidden=True, help="ignore environment variables")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="a run's directory, its train.out_dir")]


class Verb(TyperCommand):
    """A command whose help shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Verbs(TyperGroup):
    """A group of commands whose help shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
        if getattr(parameter, "min", None) is not None and parameter.metavar is None:
            parameter.metavar = "N"
        if parameter.param_type_name == "argument" and parameter.metavar is not None:
            parameter.display_type_rich = lambda ctx: None  # the name is enough: RUN, CONFIG|SECTION.KEY=VALUE
    return parameters


def resolve(words: list[str] | None, stream: TextIO | None = None) -> Config:
    """Resolve the config file ($CONFIG, then what `tamis run` would train here), then variables, then single keys.

    The effects of variables are printed to `stream`, or stdout.
    """
    path, overrides = split(words)
    chosen = path or choose_config(read_gpus())
    from_variables, effects = variable_overrides(os.environ)
    for effect in effects:
        say(effect, stream)
    config = load_config(chosen, overrides, from_variables)
    if path is None:
        say(f"no config was named, so this is {chosen}, as for tamis run", sys.stderr)
    return config


def tokenizer_override(tokenizer: str | None) -> list[str]:
    """The key that --tokenizer sets."""
    return [] if tokenizer is None else [f"data.tokenizer={json.dumps(tokenizer)}"]


def split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the words into the config file, $CONFIG if none is given, and the single keys."""
    files = [word for word in words or [] if "=" not in word]
    if key := next((word for word in files if word in known_keys()), None):
        raise ConfigError(f"{key} is a key of the config: write {key}=VALUE")
    if len(files) > 1:
        raise ConfigError(f"one config file at most, got {', '.join(files)}")
    return files[0] if files else os.environ.get("CONFIG") or None, [word for word in words or [] if "=" in word]


def loading_torch(stream: TextIO | None = None) -> None:
    """Print a first line before torch loads, which takes several seconds."""
    say(f"{__version__}: loading torch …", stream)
