"""Every example runs as its own program and prints what it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRINTED = {
    "functional.py": "output (2, 300, 8, 32)",
    "transformer.py": "decoding through the caches differs by",
    "packed.py": "packed (1, 164, 64); differs from one by one by",
    "llama.py": "parameters without a gradient: []",
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == PRINTED.keys()


@pytest.mark.parametrize("example", PRINTED)
def test_an_example_runs(example: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert PRINTED[example] in done.stdout
