"""Every example runs as a program and prints what it shows."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRINTED = {
    "functional.py": "output (2, 300, 8, 32)",
    "transformer.py": "decoding through the caches differs by",
    "packed.py": "packed (1, 164, 64); differs from one by one by",
    "llama.py": "parameters without a gradient: []",
}
RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print("===", path)
    runpy.run_path(path, run_name="__main__")
"""


def test_the_example_of_a_llama_names_what_to_install_where_that_is_missing() -> None:
    without = f"import sys; sys.modules['transformers'] = None\n{RUN_ALL}"
    command = [sys.executable, "-c", without, str(ROOT / "examples" / "llama.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install transformers" in done.stderr


def test_every_example_runs_and_prints_what_it_shows() -> None:
    """One after the other in one process, which loads torch once."""
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert {path.name for path in examples} == PRINTED.keys()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", RUN_ALL, *map(str, examples)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for path, output in zip(examples, done.stdout.split("=== ")[1:], strict=True):
        assert PRINTED[path.name] in output
