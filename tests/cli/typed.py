"""Verbs as a person types them."""

from __future__ import annotations

import subprocess
import sys

from click.testing import Result
from typer.testing import CliRunner

from tamis.cli.main import app, guarded


def tamis(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.output


def typed(*words: str) -> int:
    """As `main` runs it, in this process."""
    return guarded(lambda: app(list(words), prog_name="tamis", standalone_mode=False), debug=False)


def command_line(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tamis", *words], capture_output=True, text=True, timeout=120)
