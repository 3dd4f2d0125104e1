"""The `tamis` command line. Verbs call plain functions and import heavy modules only when they need them.

One module per panel of `tamis --help` holds the verbs; this one joins them and turns errors into messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tamis import __version__
from tamis.cli import check, measure, models, runs, train
from tamis.cli.common import Verbs, loading_torch
from tamis.config.legacy import Request, parse
from tamis.config.load import guess_key
from tamis.config.process import set_process_defaults
from tamis.run.files.console import (
    discard_unwritable_output,
    open_closed_streams,
    print_error,
    replace_unencodable,
    say,
)
from tamis.run.files.directory import DirectoryReplaced
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.lock import RunLocked
from tamis.run.files.records import WRITE_REMEDIES, os_error_text

OTHER_VERBS = {  # verbs of other tools and what does the same here
    "autotune": "tune",
    "benchmark": "bench",
    "chat": "generate",
    "doctor": "check",
    "evaluate": "eval",
    "inference": "generate",
    "ls": "list",
    "pretrain": "run",
    "ps": "list",
    "resume": "run",
    "sample": "generate",
    "show": "monitor",
    "start": "run",
    "stop": "halt",
    "tail": "logs",
    "validate": "config validate",
    "watch": "monitor",
}
LEAVES_A_CHECKPOINT = (ExitCode.DONE, ExitCode.HALTED, ExitCode.PREEMPTED)

app = typer.Typer(
    name="tamis",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every verb's --help has examples. --debug after any verb shows where an error came from. "
    "Exit codes: 0 done, 1 failed, 2 wrong words or config, 3 halted, 4 stopped by a signal, 5 anomaly, 6 no data, "
    "7 cost limit, 130 interrupted (Ctrl-C, or TERM for a bench).",
)
for panel in (train, runs, check, models, measure):  # the order of the help
    app.add_typer(panel.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tamis {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Trains language models with Native Sparse Attention, hands off.

    Start with: tamis run
    """


def main() -> None:
    """Run the command line: one clear message for an error a user can mend; `--debug` shows where it came from."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    sys.exit(guarded(lambda: app(arguments, prog_name="tamis", standalone_mode=False), debug="--debug" in sys.argv))


def train_showcase(argv: list[str]) -> int:
    """Run scripts/train_showcase.py: the runbooks' flags and variables."""
    return guarded(lambda: _train_as_asked(parse(argv, os.environ)), debug=False)


def _train_as_asked(request: Request) -> int:
    loading_torch()
    is_main = os.environ.get("RANK", "0") == "0"
    chosen = f"config {request.config_path}, data.dataset {request.config.data.dataset}"
    hint = "" if request.config.data.dataset == "synthetic" else " (for random tokens: --dataset synthetic)"
    for line in [*request.effects, chosen + hint] if is_main else []:
        say(line)
    from tamis.train.main import train_config

    code = train_config(request.config, request.resume)
    if request.save is not None and is_main and code in LEAVES_A_CHECKPOINT:
        from tamis.run.files.manifest import copy_latest

        say(f"copied {copy_latest(request.config.train.out_dir, request.save)} to {request.save}")
    return code


def guarded(work: Callable[[], Any], debug: bool) -> int:
    """Run `work`, and turn an error into one message and an exit code."""
    set_process_defaults()  # before a verb imports torch
    open_closed_streams()
    replace_unencodable()
    try:
        return int(work() or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        message, code = _explained(error)
        if message:
            print_error(f"error: {message}")
        return code
    finally:
        discard_unwritable_output()


def _explained(error: Exception) -> tuple[str, int]:
    """The message and exit code of an error; one that is not ours also shows its type."""
    from tamis.data import DataError

    if hasattr(error, "format_message"):  # an error of the parser, which typer vendors under several names
        return _wrong_words(error), ExitCode.USAGE
    if isinstance(error, DirectoryReplaced):
        return str(error), ExitCode.CRASH
    if isinstance(error, DataError):
        return str(error), ExitCode.DATA_FAILURE
    if isinstance(error, OSError):
        return os_error_text(error), ExitCode.CRASH if error.errno in WRITE_REMEDIES else ExitCode.USAGE
    if isinstance(error, (ValueError, RunLocked)):  # ConfigError and DamagedCheckpoint are ValueErrors
        return str(error), ExitCode.USAGE
    return f"{type(error).__name__}: {error} (--debug shows where)", ExitCode.CRASH


def _wrong_words(error: Any) -> str:
    """The message for an unknown flag, verb or value, with a hint; empty if the help was shown instead."""
    message = error.format_message()
    path = getattr(getattr(error, "ctx", None), "command_path", "tamis")
    if message.startswith("No such command '") and (ours := OTHER_VERBS.get(message.split("'")[1])):
        message = f"{message.partition('. ')[0].rstrip('.')}. Did you mean '{ours}'?"
    if message.startswith("No such command '") and "=" in (word := message.split("'")[1]):
        message = f"{message.partition('. ')[0].rstrip('.')}. Did you mean 'run {word}'?"
    flag = getattr(error, "option_name", None) or ""
    if flag.startswith("--") and (key := guess_key(flag.lstrip("-").replace("-", "_"))):
        message = f"No such option: {flag}; to set a key of the config, write {key}=VALUE"
    return f"{message} ({path} --help shows what there is)" if message else ""


if __name__ == "__main__":
    main()
