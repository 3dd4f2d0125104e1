"""env.json: the versions, GPUs and settings a run had. Of the environment, only the names listed below are read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tamis.config.legacy import PASSED_ON, VARIABLES
from tamis.run.files.hardware import Gpu, describe_cpu, gpu_records
from tamis.run.files.records import utc

# Names, not prefixes: a prefix would let NSA_ACCESS_KEY or NCCL_PASSWORD through.
NCCL_VARIABLES = ("ALGO", "DEBUG", "IB_DISABLE", "P2P_DISABLE", "PROTO", "SHM_DISABLE", "SOCKET_IFNAME")
RECORDED_VARIABLES = (
    *VARIABLES,
    *PASSED_ON,
    *(f"NCCL_{name}" for name in NCCL_VARIABLES),
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TAMIS_TILES",
)
PACKAGES = ("tamis", "torch", "triton", "numpy", "tiktoken", "datasets", "pyarrow", "safetensors", "pydantic")
ORDINARY_VALUE = re.compile(r"[\w.,:=+/ \-\[\]{}]{0,300}")  # numbers, switches, paths; no address with a password in it


def describe_environment(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything env.json holds."""
    return {
        "time": utc(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cuda_of_torch": cuda_of_torch(),
        "driver": gpus[0].driver if gpus else None,
        "gpus": gpu_records(gpus),
        "cpu": describe_cpu(),
        "variables": recorded_variables(os.environ if environment is None else environment),
    }


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The listed variables that are set; a value that does not look like a setting is withheld."""
    return {
        name: environment[name] if ORDINARY_VALUE.fullmatch(environment[name]) else "(withheld: not an ordinary value)"
        for name in RECORDED_VARIABLES
        if name in environment
    }


def package_versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def cuda_of_torch() -> str | None:
    """The CUDA version torch was built for; None for a CPU build or no torch. Reads torch's version file alone."""
    version = _torch_version_module()
    return getattr(version, "cuda", None) if version else None


def _torch_version_module() -> ModuleType | None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    spec = importlib.util.spec_from_file_location("torch_version_alone", Path(torch.origin).with_name("version.py"))
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
