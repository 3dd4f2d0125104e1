"""Environment defaults: programs set them before torch loads; imports change nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tamis.config.process import DEFAULTS, cache_folders

CHILD = """
import json, os, runpy, sys
import tamis, tamis.cli.main, tamis.config
after_import = {name: os.environ.get(name) for name in %(names)r}
sys.argv = ["main", "--help"]
try:
    runpy.run_module("tamis.train.main", run_name="__main__")
except SystemExit:
    print(json.dumps([after_import, {name: os.environ.get(name) for name in %(names)r}]))
"""


def test_importing_changes_no_variable_and_the_worker_program_sets_those_that_are_unset() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    environment["OMP_WAIT_POLICY"] = "ACTIVE"
    command = [sys.executable, "-c", CHILD % {"names": list(DEFAULTS)}]
    output = subprocess.check_output(command, text=True, env=environment)
    imported, started = json.loads(output.splitlines()[-1])
    assert imported == {"ONEDNN_MAX_CPU_ISA": None, "OMP_WAIT_POLICY": "ACTIVE"}
    assert started == {**DEFAULTS, "OMP_WAIT_POLICY": "ACTIVE"}


def test_compiled_kernels_are_kept_in_the_users_cache_folder_if_that_is_writable(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert cache_folders({"XDG_CACHE_HOME": str(folder)}) == {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "tamis/inductor"),
        "TRITON_CACHE_DIR": str(folder / "tamis/triton"),
    }
    assert "TRITON_CACHE_DIR" not in cache_folders({"XDG_CACHE_HOME": str(folder), "TRITON_HOME": "/elsewhere"})
    assert cache_folders({"XDG_CACHE_HOME": str(tmp_path / "not/there")}) == {}
