"""The model's own kernels compile for A100 and H100 in every precision, load 16 bytes at once and do not spill."""

import json
import os
import subprocess
import sys

import pytest

REGISTERS_OF_2048_THREADS = 32  # more, and a second row would not fit on the multiprocessor


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_load_wide_and_do_not_spill(arch: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.model.ahead_of_time", str(arch)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=290)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = json.loads(run.stdout.splitlines()[-1])
    assert len(kernels) == 3 * 4
    assert {name: k["stack"] for name, k in kernels.items() if k["stack"]} == {}
    loss = {name: k for name, k in kernels.items() if name.startswith("_cross_entropy")}
    assert {k["narrow_loads"] for k in loss.values()} == {1}  # the target's logit
    assert {k["narrow_loads"] for name, k in kernels.items() if name not in loss} == {0}
    assert max(k["registers"] for k in loss.values()) <= REGISTERS_OF_2048_THREADS
