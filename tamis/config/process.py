"""Environment defaults of a Tamis process. No torch."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from pathlib import Path

# PyTorch reads both once, when it loads. ONEDNN_MAX_CPU_ISA: some virtual machines report AMX and then trap it, which
# kills Python at the first bf16 product on the CPU. OMP_WAIT_POLICY: OpenMP threads that spin while they wait starve
# other processes on the same cores.
DEFAULTS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "OMP_WAIT_POLICY": "PASSIVE"}


def set_process_defaults() -> None:
    """Set the defaults that are not set yet. Programs call this first, before anything imports torch."""
    for name, value in (DEFAULTS | cache_folders(os.environ)).items():
        os.environ.setdefault(name, value)
    atexit.register(gc.freeze)  # the collection at the exit would visit all of torch for half a second


def cache_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Folders for compiled kernels that outlive a restart of the machine; none if the user's folder is not writable.

    PyTorch's own folder is in /tmp. It also moves Triton's folder there in the middle of a run unless that is set, and
    what was compiled before is then compiled again.
    """
    home = Path(os.path.expanduser("~"))
    base = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    existing = base if base.exists() else base.parent
    if not os.access(existing, os.W_OK):
        return {}
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(base / "tamis" / "inductor")}
    return folders if "TRITON_HOME" in environment else folders | {"TRITON_CACHE_DIR": str(base / "tamis" / "triton")}
