"""What this machine has – GPUs, processor, disk – and what follows from it: which config, how many processes.

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

from tamis.run.workers import trainer_command

MIB = 1024 * 1024
SHOWCASE_CONFIG = "configs/train_showcase.yaml"
# Smallest total memory for each config, as NVML reports it; cards sold as 80 and 40 GB report a little less or more.
CONFIG_BY_MEMORY_MIB = (
    (75_000, "configs/m7c_125m_80g.yaml"),
    (35_000, "configs/m7c_125m_40g.yaml"),
    (0, "configs/m7c_125m_24g.yaml"),
)


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


@dataclass(frozen=True)
class LaunchPlan:
    """How the workers are started, with the reasons, ready for the supervisor."""

    config_path: str
    processes: int
    environment: dict[str, str]  # only what is added to the user's own
    reasons: list[str]

    def command(self, config_yaml: Path) -> list[str]:
        return trainer_command(config_yaml, self.processes, None)


class GpuLost(RuntimeError):
    """A GPU is there but does not answer; the message says which and what to do."""


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


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str) -> list[Gpu]:
    """What CUDA would show: the named GPUs in their order, up to the first name that is none of them."""
    chosen: list[Gpu] = []
    for name in (part.strip() for part in cuda_visible_devices.split(",")):
        matches = [g for g in gpus if name == str(g.index) or (name.startswith("GPU-") and g.uuid.startswith(name))]
        if not matches:
            break
        chosen.append(matches[0])
    return chosen


def choose_config(gpus: Sequence[Gpu]) -> str:
    """The config made for the smallest GPU, because every GPU runs the same micro-batch."""
    if not gpus:
        return SHOWCASE_CONFIG
    smallest = min(gpu.total_mib for gpu in gpus)
    return next(path for least, path in CONFIG_BY_MEMORY_MIB if smallest >= least)


def nccl_environment(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> dict[str, str]:
    """Settings that are safe on a rented single node. Whatever the user set stays as it is."""
    if not gpus:
        return {}
    settings = {"NCCL_IB_DISABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_DEBUG": "WARN"}
    if not all(gpu.nvlink for gpu in gpus):
        # Over PCIe, peer copies hang behind some virtualised switches; over NVLink, turning them off only costs speed.
        settings |= {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    return {name: value for name, value in settings.items() if name not in environment}


def launch_plan(
    gpus: Sequence[Gpu], *, config_path: str | None = None, environment: Mapping[str, str] | None = None
) -> LaunchPlan:
    """GPUs → config, process count, command and environment. A config given by the user wins over the choice."""
    chosen = config_path or choose_config(gpus)
    return LaunchPlan(
        config_path=chosen,
        processes=max(1, len(gpus)),
        environment=nccl_environment(gpus, os.environ if environment is None else environment),
        reasons=[*_reasons(gpus), f"config: {chosen}" + (", as given" if config_path else "")],
    )


def describe_cpu() -> dict[str, Any]:
    return {
        "model": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // MIB,
    }


def free_disk_mib(path: Path) -> int:
    """Free space where `path` is or will be created."""
    existing = next(p for p in [path.absolute(), *path.absolute().parents] if p.exists())
    return shutil.disk_usage(existing).free // MIB


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


def _reasons(gpus: Sequence[Gpu]) -> list[str]:
    if not gpus:
        return ["no GPU found: one process on the CPU; without a config of your own, the embedded showcase"]
    smallest = min(gpus, key=lambda gpu: gpu.total_mib)
    how = "python" if len(gpus) == 1 else f"torchrun --nproc_per_node={len(gpus)}"
    return [f"{len(gpus)} GPU(s): {how}", f"smallest: {smallest.name} with {smallest.total_mib} MiB"]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
