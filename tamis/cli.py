"""The `tamis` command line: verbs to plain functions, no logic. What is heavy is imported by the verb that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tamis import __version__
from tamis.config import Config, ConfigError, load_config
from tamis.legacy import parse, variable_overrides
from tamis.run.exit_codes import ExitCode

app = typer.Typer(
    name="tamis",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Trains language models with Native Sparse Attention, hands off.\n\nStart with: tamis run",
)
config_app = typer.Typer(no_args_is_help=True, help="Show or check a configuration.")
app.add_typer(config_app, name="config")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="a YAML file, and changes to single keys on top"),
]
RunDir = Annotated[Path, typer.Argument(help="a run's directory, its train.out_dir")]


def _resolve(words: list[str] | None) -> Config:
    """The config file ($CONFIG when none is given), then the runbooks' variables, then single keys."""
    path, overrides = _split(words)
    from_variables, effects = variable_overrides(os.environ)
    for effect in effects:
        print(f"[tamis] {effect}", flush=True)
    return load_config(path, [*from_variables, *overrides])


def _split(words: list[str] | None) -> tuple[str | None, list[str]]:
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, got {', '.join(files)}")
    return files[0] if files else os.environ.get("CONFIG"), [word for word in words or [] if "=" in word]


@app.command(rich_help_panel="Train")
def run(
    words: Words = None,
    detach: Annotated[bool, typer.Option("--detach", help="go on in the background; the terminal may go away")] = False,
) -> None:
    """The main job: looks at the machine, smokes, trains under supervision, resumes by itself, hands over.

    The GPUs decide the config when none is given; without a GPU the embedded showcase runs on the CPU.

    Examples:

      tamis run

      tamis run configs/m7c_125m_80g.yaml data.dataset=shards data.local_path=shards/ --detach
    """
    from tamis.job import main_job

    path, overrides = _split(words)
    raise typer.Exit(main_job(path, overrides, detach))


@app.command(rich_help_panel="Train")
def train(
    words: Words = None,
    resume: Annotated[str | None, typer.Option(help="a checkpoint file, or auto for the newest valid one")] = None,
) -> None:
    """Train in this process (or as one of torchrun's), unsupervised.

    Examples:

      tamis train configs/train_showcase.yaml

      tamis train configs/m7c_125m_80g.yaml train.steps=1000 --resume auto
    """
    print(f"[tamis] {__version__}: loading torch …", flush=True)
    resolved = _resolve(words)
    from tamis.train.main import train_config

    raise typer.Exit(train_config(resolved, resume))


@app.command(rich_help_panel="Use the model")
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint_step{N}.pt, a run's directory, or an exported folder")],
    prompt: Annotated[list[str] | None, typer.Option(help="text to continue; may be given several times")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a file with one prompt a line")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to draw")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(help="draw among the k likeliest; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="draw among the likeliest that hold this much probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the drawing")] = 1337,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Continue a prompt from a checkpoint, streaming; text to stdout, speed to stderr.

    Example: tamis generate artifacts/train_showcase --prompt "Fellow citizens" --max-new-tokens 100
    """
    from tamis.generate.command import generate_command

    generate_command(
        checkpoint,
        prompt,
        prompt_file,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        device=device,
    )


@app.command(rich_help_panel="Look")
def check(words: Words = None, quick: Annotated[bool, typer.Option(help="only what needs no torch")] = False) -> None:
    """Is this machine ready for this run? Numbered checks, each with its evidence and its remedy.

    Example: tamis check configs/m7c_125m_80g.yaml
    """
    from tamis.run.preflight import check as preflight

    raise typer.Exit(preflight(_resolve(words), quick=quick))


@app.command(rich_help_panel="Look")
def verify(words: Words = None) -> None:
    """Prove the attention kernels against the reference on this device, and that the model is causal.

    Example: tamis verify configs/m7c_125m_80g.yaml
    """
    print(f"[tamis] {__version__}: loading torch …", flush=True)
    from tamis.train.selfcheck import report

    raise typer.Exit(report(_resolve(words)))


@config_app.command("show")
def config_show(words: Words = None) -> None:
    """Print the resolved configuration, its hash and the true parameter count.

    Example: tamis config show configs/m7c_125m_80g.yaml train.steps=100
    """
    from tamis.size import parameter_count

    resolved = _resolve(words)
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


def main() -> None:
    """The entry point: one clear message for an error a user can mend; `--debug` shows where any error came from."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    sys.exit(guarded(lambda: app(arguments, standalone_mode=True), debug))


def train_showcase(argv: list[str]) -> int:
    """scripts/train_showcase.py: the runbooks' flags and variables."""
    print(f"[tamis] {__version__}: loading torch …", flush=True)

    def work() -> int:
        request = parse(argv, os.environ)
        for effect in request.effects:
            print(f"[tamis] {effect}", flush=True)
        print(f"[tamis] config {request.config_path}", flush=True)
        from tamis.train.main import train_config

        code = train_config(request.config, request.resume)
        if request.save is not None:
            from tamis.run.checkpoints import copy_latest

            print(f"[tamis] copied {copy_latest(request.config.train.out_dir, request.save)} to {request.save}")
        return code

    return guarded(work, debug=False)


def guarded(work: Callable[[], Any], debug: bool) -> int:
    """Run, and turn an error the user can mend into one message."""
    try:
        return int(work() or 0)
    except ConfigError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        print(f"error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return ExitCode.CRASH


if __name__ == "__main__":
    main()
