"""Verbs that check before training: check, verify, causality, estimate, config."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.common import (
    CHECK,
    Resolved,
    Verb,
    Verbs,
    Words,
    loading_torch,
    resolve,
    split,
)
from tamis.config import ConfigError, load_config
from tamis.run.files.console import announced, print_line
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.hardware import read_gpus

app = typer.Typer()
verb = partial(app.command, cls=Verb, rich_help_panel=CHECK)

Json = Annotated[bool, typer.Option("--json", help="one JSON document instead of lines")]

CONFIG_HELP = """Show or check a configuration.

Examples:

  tamis config show configs/m7c_125m_80g.yaml train.steps=100

  tamis config validate configs/m7c_125m_80g.yaml
"""
config_app = typer.Typer(cls=Verbs, no_args_is_help=True, help=CONFIG_HELP)
app.add_typer(config_app, name="config", rich_help_panel=CHECK)
config_verb = partial(config_app.command, cls=Verb)


@verb()
def check(
    words: Words = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="only what needs no torch and no data; takes a second")
    ] = False,
) -> None:
    """Check that this machine is ready for this run: numbered checks, each with its evidence and remedy.

    The GPUs decide the config when none is given, as for `tamis run`. Exit code 1 when a check failed.

    Examples:

      tamis check configs/m7c_125m_80g.yaml

      tamis check --quick
    """
    from tamis.run.checks.preflight import run_preflight

    config = resolve(words).with_steps(max(1, len(read_gpus())))
    raise typer.Exit(run_preflight(config, quick=quick))


@verb()
def verify(words: Words = None, json: Json = False, resolved: Resolved = False) -> None:
    """Compare the attention kernels with the reference on this device, and check that the model is causal.

    Example: tamis verify configs/m7c_125m_80g.yaml
    """
    stream = sys.stderr if json else None
    config = load_config(split(words)[0]) if resolved else resolve(words, stream)
    loading_torch(stream)
    from tamis.train.tools.selfcheck import run_selfcheck

    with announced(f"checking a fresh {config.model.name} on this device"):
        code = run_selfcheck(config, json)
    raise typer.Exit(code)


@verb("verify-checkpoint")
def verify_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="file or folder of a run")],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="the run's config.yaml")],
) -> None:
    """Load a checkpoint as a resume would, on the CPU; exit code 0 if it loads.

    Example: tamis verify-checkpoint artifacts/m7c_125m/checkpoint_step5000.pt artifacts/m7c_125m/config.yaml
    """
    resolved = load_config(config)
    loading_torch()
    from tamis.checkpoint.file import verify_loading

    with announced(f"loading {checkpoint}"):
        verify_loading(checkpoint, resolved)
    print_line(f"{checkpoint} loads")


@verb()
def causality(
    words: Words = None,
    full: Annotated[
        bool, typer.Option("--full", help="also lengths around l, w, 2w, 4w, the kernels, the loss floor")
    ] = False,
) -> None:
    """Run three tests that the future never changes the past; the log goes to artifacts/test-reports/.

    Example: tamis causality configs/m7c_125m_2xa100_production.yaml --full
    """
    resolved = resolve(words)
    loading_torch()
    from tamis.train.tools.causality import run_causality_tests

    with announced(f"testing a fresh {resolved.model.name}"):
        code = run_causality_tests(resolved, full)
    raise typer.Exit(code)


@verb()
def estimate(
    words: Words = None,
    processes: Annotated[int, typer.Option(min=1, help="GPUs the run will use")] = 1,
    json: Json = False,
    resolved: Resolved = False,
) -> None:
    """Estimate what a run costs from a few measured steps: speed, memory, time, disk, and better settings.

    The GPUs decide the config when none is given, as for `tamis run`.

    Example: tamis estimate configs/m7c_125m_2xa100_production.yaml --processes 2
    """
    stream = sys.stderr if json else None
    config = load_config(split(words)[0]) if resolved else resolve(words, stream)
    loading_torch(stream)
    from tamis.train.tools.estimate import run_estimate

    with announced(f"measuring a few steps of {config.model.name}"):
        code = run_estimate(config, processes, json)
    raise typer.Exit(code)


@config_verb("show")
def config_show(words: Words = None) -> None:
    """Print the resolved configuration, its hash and the true parameter count.

    Example: tamis config show configs/m7c_125m_80g.yaml train.steps=100
    """
    from tamis.config.size import parameter_count

    resolved = resolve(words)
    print(resolved.to_yaml(), end="")
    print(f"# hash {resolved.hash}, {parameter_count(resolved):,} parameters")


@config_verb("twin")
def config_twin(words: Words = None) -> None:
    """Print the dense twin of a configuration, with a feed-forward wide enough for as many parameters.

    Example: tamis config twin configs/m7c_125m_80g.yaml train.out_dir=artifacts/m7c_dense > dense.yaml
    """
    from tamis.config.size import dense_twin, parameter_count

    resolved = resolve(words, sys.stderr)
    twin = dense_twin(resolved)
    print(twin.to_yaml(), end="")
    print(f"# {parameter_count(twin):,} parameters; the model has {parameter_count(resolved):,}")


@config_verb("validate")
def config_validate(configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="YAML files")]) -> None:
    """Check configuration files; each problem is listed with its key.

    Example: tamis config validate configs/*.yaml
    """
    bad = 0
    for path in configs:
        try:
            print_line(f"ok   {path} {load_config(path).hash}")
        except ConfigError as error:
            bad += 1
            print_line("\n       ".join([f"FAIL {path}:", *str(error).splitlines()]))
    raise typer.Exit(ExitCode.USAGE if bad else ExitCode.DONE)
