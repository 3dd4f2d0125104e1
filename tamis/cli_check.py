"""Verbs that check before training: check, verify, causality, estimate, config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli_base import CHECK, Words, loading_torch, resolve
from tamis.config import ConfigError, load_config
from tamis.run.exit_codes import ExitCode

app = typer.Typer()

config_app = typer.Typer(no_args_is_help=True, help="Show or check a configuration.")
app.add_typer(config_app, name="config", rich_help_panel=CHECK)


@app.command(rich_help_panel=CHECK)
def check(words: Words = None, quick: Annotated[bool, typer.Option(help="only what needs no torch")] = False) -> None:
    """Is this machine ready for this run? Numbered checks, each with its evidence and its remedy.

    Example: tamis check configs/m7c_125m_80g.yaml
    """
    from tamis.run.preflight import check as preflight

    raise typer.Exit(preflight(resolve(words), quick=quick))


@app.command(rich_help_panel=CHECK)
def verify(words: Words = None) -> None:
    """Prove the attention kernels against the reference on this device, and that the model is causal.

    Example: tamis verify configs/m7c_125m_80g.yaml
    """
    loading_torch()
    from tamis.train.selfcheck import report

    raise typer.Exit(report(resolve(words)))


@app.command(rich_help_panel=CHECK)
def causality(
    words: Words = None,
    full: Annotated[bool, typer.Option("--full", help="also the lengths around l, w, 2w, 4w, kernels, floor")] = False,
) -> None:
    """Three tests that nothing of the future reaches the past; the log goes to artifacts/test-reports/.

    Example: tamis causality configs/m7c_125m_2xa100_production.yaml --full
    """
    loading_torch()
    from tamis.train.causality import causality as test

    raise typer.Exit(test(resolve(words), full))


@app.command(rich_help_panel=CHECK)
def estimate(
    words: Words = None,
    processes: Annotated[int, typer.Option(min=1, help="GPUs the run will use")] = 1,
    json: Annotated[bool, typer.Option("--json", help="one JSON document instead of lines")] = False,
) -> None:
    """What a run will cost, from a few measured steps: speed, memory, time, disk, and what would be better.

    Example: tamis estimate configs/m7c_125m_2xa100_production.yaml --processes 2
    """
    if not json:
        loading_torch()
    resolved = resolve(words)
    from tamis.train.estimate import report

    raise typer.Exit(report(resolved, processes, json))


@config_app.command("show")
def config_show(words: Words = None) -> None:
    """Print the resolved configuration, its hash and the true parameter count.

    Example: tamis config show configs/m7c_125m_80g.yaml train.steps=100
    """
    from tamis.size import parameter_count

    resolved = resolve(words)
    print(resolved.to_yaml(), end="")
    print(f"# hash {resolved.hash}, {parameter_count(resolved):,} parameters")


@config_app.command("validate")
def config_validate(configs: Annotated[list[Path], typer.Argument(help="YAML files")]) -> None:
    """Check configuration files; every problem is named with its key.

    Example: tamis config validate configs/*.yaml
    """
    bad = 0
    for path in configs:
        try:
            print(f"ok   {path} {load_config(path).hash}")
        except ConfigError as error:
            bad += 1
            print(f"FAIL {path}: {error}")
    raise typer.Exit(ExitCode.USAGE if bad else ExitCode.DONE)
