"""What this machine has: GPUs, processor, disk.

GPUs are read through NVML, so nothing here needs torch or wakes up a CUDA context.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tamis.run.files.reading import MIB


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total_mib: int
    free_mib: int
    utilisation_percent: int | None  # None: the driver does not say (some virtual GPUs)
    driver: str
    uuid: str = ""
    nvlink: bool = False  # at least one active link to another GPU

    @property
    def used_mib(self) -> int:
        return self.total_mib - self.free_mib


class GpuLost(RuntimeError):
    """A GPU is there but does not answer; the message names it and the remedy."""


def read_gpus(nvml: Any = None, environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs this process may use; none when there is no driver. `nvml` stands in for the pynvml module in tests.

    Raises GpuLost rather than going on with fewer GPUs than the machine has.
    """
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    gpus, lost = [], []
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_read_gpu(nvml, index, driver))
            except nvml.NVMLError as error:
                lost.append(f"GPU {index} does not answer ({error})")
    finally:
        nvml.nvmlShutdown()
    if lost and visible is None:
        raise GpuLost(f"{'; '.join(lost)}: reset it (nvidia-smi -r), or leave it out with CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else visible_gpus(gpus, visible)


def read_capability(gpu: Gpu, nvml: Any = None) -> tuple[int, int]:
    """The CUDA compute capability of a GPU: (9, 0) for an H100."""
    nvml = nvml or importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByIndex(gpu.index))
    finally:
        nvml.nvmlShutdown()
    return int(major), int(minor)


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str) -> list[Gpu]:
    """What CUDA would show: the named GPUs in their order, up to the first name that is none of them."""
    chosen: list[Gpu] = []
    for name in (part.strip() for part in cuda_visible_devices.split(",")):
        matches = [g for g in gpus if name == str(g.index) or (name.startswith("GPU-") and g.uuid.startswith(name))]
        if not matches:
            break
        chosen.append(matches[0])
    return chosen


def describe_cpu() -> dict[str, Any]:
    return {
        "model": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // MIB,
    }


def free_disk_mib(path: Path) -> int:
    """Free space where `path` is or will be created."""
    return shutil.disk_usage(existing_parent(path)).free // MIB


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(p for p in [path.absolute(), *path.absolute().parents] if p.exists())


def gpu_records(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    return [asdict(gpu) for gpu in gpus]


def _read_gpu(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_mib=memory.total // MIB,
        free_mib=memory.free // MIB,
        utilisation_percent=_utilisation(nvml, handle),
        driver=driver,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        nvlink=_has_nvlink(nvml, handle),
    )


def _utilisation(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None


def _has_nvlink(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, 0))
    except nvml.NVMLError:
        return False


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
