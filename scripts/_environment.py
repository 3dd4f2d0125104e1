"""Run a script in the project's environment, whichever Python it was started with.

A machine's own `python` may be older than the project's, so this file uses nothing newer than Python 3.8.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "pydantic", "typer", "tiktoken")


def enter_environment() -> None:
    """Put the checkout on the path. Where packages are missing, start again with the Python of `.venv`."""
    sys.path.insert(0, str(ROOT))
    missing = [name for name in NEEDED if find_spec(name) is None]
    if sys.version_info >= (3, 11) and not missing:
        return
    python = str(ROOT / ".venv" / "bin" / "python")
    if os.path.exists(python) and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [python, "-u", *sys.argv])
    lacks = ", ".join(missing) or "the features of Python 3.11"
    sys.exit(f"error: {sys.executable} lacks {lacks}: run bash scripts/prime_bootstrap.sh first")
