"""Environment defaults of a Tamis process. No torch."""

from __future__ import annotations

import os

# PyTorch reads both once, when it loads. ONEDNN_MAX_CPU_ISA: some virtual machines report AMX and then trap it, which
# kills Python at the first bf16 product on the CPU. OMP_WAIT_POLICY: OpenMP threads that spin while they wait starve
# other processes on the same cores.
DEFAULTS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "OMP_WAIT_POLICY": "PASSIVE"}


def set_process_defaults() -> None:
    """Set the defaults that are not set yet. Programs call this first, before anything imports torch."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
