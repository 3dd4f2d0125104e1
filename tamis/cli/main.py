"""The `tamis` command line: verbs to plain functions, no logic. What is heavy is imported by the verb that needs it.

The verbs are in cli_*.py, one file per panel of `tamis --help`; here they meet, and errors become one message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from tamis.cli import check as cli_check
from tamis.cli import measure as cli_measure
from tamis.cli import models as cli_use
from tamis.cli import runs as cli_watch
from tamis.cli import train as cli_train
from tamis.cli.common import loading_torch
from tamis.cli.help import Verbs
from tamis.config.legacy import Request, parse
from tamis.config.process import set_process_defaults
from tamis.run.files.console import discard_unwritable_output
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.lock import RunLocked

app = typer.Typer(
    name="tamis",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Trains language models with Native Sparse Attention, hands off.\n\nStart with: tamis run",
    epilog="Every verb's --help has examples. --debug after any verb shows where an error came from. "
    "Exit codes: 0 done, 1 failed, 2 wrong words or config, 3 halted, 4 stopped by a signal, 5 anomaly, 6 no data.",
)
for panel in (cli_train, cli_watch, cli_check, cli_use, cli_measure):  # the order of the help
    app.add_typer(panel.app)

LEAVES_A_CHECKPOINT = (ExitCode.DONE, ExitCode.HALTED, ExitCode.PREEMPTED)


def main() -> None:
    """The entry point: one clear message for an error a user can mend; `--debug` shows where any error came from."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    sys.exit(guarded(lambda: app(arguments, prog_name="tamis", standalone_mode=False), debug="--debug" in sys.argv))


def train_showcase(argv: list[str]) -> int:
    """scripts/train_showcase.py: the runbooks' flags and variables."""
    return guarded(lambda: _train_as_asked(parse(argv, os.environ)), debug=False)


def _train_as_asked(request: Request) -> int:
    loading_torch()
    is_main = os.environ.get("RANK", "0") == "0"
    for line in [*request.effects, f"config {request.config_path}"] if is_main else []:
        print(f"[tamis] {line}", flush=True)
    from tamis.train.main import train_config

    code = train_config(request.config, request.resume)
    if request.save is not None and is_main and code in LEAVES_A_CHECKPOINT:
        from tamis.run.files.manifest import copy_latest

        print(f"[tamis] copied {copy_latest(request.config.train.out_dir, request.save)} to {request.save}")
    return code


def guarded(work: Callable[[], Any], debug: bool) -> int:
    """Run `work`, and turn an error into one message and an exit code."""
    set_process_defaults()  # before a verb imports torch
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
            print(f"error: {message}", file=sys.stderr, flush=True)
        return code
    finally:
        discard_unwritable_output()


def _explained(error: Exception) -> tuple[str, int]:
    """What our own errors say is meant for the user; of any other, the kind matters too."""
    from tamis.data.errors import DataError

    if hasattr(error, "format_message"):  # of the command line's own parser, which comes with typer under several names
        return _wrong_words(error), ExitCode.USAGE
    if isinstance(error, DataError):
        return str(error), ExitCode.DATA_FAILURE
    if isinstance(error, (ValueError, OSError, RunLocked)):  # ConfigError and DamagedCheckpoint are ValueErrors
        return str(error), ExitCode.USAGE
    return f"{type(error).__name__}: {error} (--debug shows where)", ExitCode.CRASH


def _wrong_words(error: Any) -> str:
    """A flag, verb or value that does not exist, and where to read which do; nothing when help was shown instead."""
    message = error.format_message()
    path = getattr(getattr(error, "ctx", None), "command_path", "tamis")
    return f"{message} ({path} --help shows what there is)" if message else ""


if __name__ == "__main__":
    main()
