"""What this machine has: GPUs, processor, disk.

GPUs are read through NVML, so nothing here needs torch or wakes up a CUDA context.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tamis.run.files.reading import MIB

SLOWDOWNS = {
    0x60: "heat",
    0x80: "power brake",
    0x08: "hardware protection",
    0x04: "power limit",
    0x02: "application clocks",
}  # bits of NVML's clocks event reasons; left out: idle, sync boost, a display, limits of the board and the voltage
FAULTS = ("heat", "power brake", "hardware protection")  # others are settings, or the power limit of a busy GPU
PROTECTION = 0x08
PROTECTED_FROM = 0xC0  # heat and the power brake, which set PROTECTION as well


@dataclass(frozen=True)
class GpuSpeed:
    """How fast a GPU may run at this moment. None: not reported by the driver."""

    clock_mhz: int | None = None  # of the multiprocessors
    top_clock_mhz: int | None = None
    power_w: int | None = None
    power_limit_w: int | None = None
    default_power_limit_w: int | None = None
    temperature_c: int | None = None
    slowed_by: tuple[str, ...] = ()  # values of SLOWDOWNS

    @property
    def slowed_or_limited(self) -> str:
        """What makes this GPU slower than others of its model, in words; empty where nothing does.

        Protection alone is left out: a GPU that changes its clock reports it for a moment.
        """
        words = []
        limit, default = self.power_limit_w, self.default_power_limit_w
        if limit and default and limit < default:
            words.append(f"limited to {limit} of {default} W")
        if faults := [cause for cause in self.slowed_by if cause in FAULTS and cause != SLOWDOWNS[PROTECTION]]:
            words.append(f"slowed by {' and '.join(faults)}")
        return ", ".join(words)


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total_mib: int
    free_mib: int
    utilisation_percent: int | None  # None: not reported by the driver (some virtual GPUs)
    driver: str
    uuid: str = ""
    nvlink: bool = False  # at least one active link to another GPU
    speed: GpuSpeed = GpuSpeed()

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
        nvlink=bool(_ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, 0)),
        speed=_read_speed(nvml, handle),
    )


def _utilisation(nvml: Any, handle: Any) -> int | None:
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else int(rates.gpu)


def _read_speed(nvml: Any, handle: Any) -> GpuSpeed:
    def watts(read: Callable[..., Any]) -> int | None:
        milliwatts = _ask(nvml, read, handle)
        return None if milliwatts is None else round(milliwatts / 1000)

    reasons = _clocks_event_reasons(nvml, handle)
    if reasons & PROTECTED_FROM:
        reasons &= ~PROTECTION
    return GpuSpeed(
        clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        top_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        power_w=watts(nvml.nvmlDeviceGetPowerUsage),
        power_limit_w=watts(nvml.nvmlDeviceGetEnforcedPowerLimit),
        default_power_limit_w=watts(nvml.nvmlDeviceGetPowerManagementDefaultLimit),
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        slowed_by=tuple(cause for bits, cause in SLOWDOWNS.items() if bits & reasons),
    )


def _clocks_event_reasons(nvml: Any, handle: Any) -> int:
    """A mask; 0 where the driver reports none. Drivers before 535 have the second function alone."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        read = getattr(nvml, name, None)  # older bindings lack the first, and later ones will lack the second
        reasons = None if read is None else _ask(nvml, read, handle)
        if reasons is not None:
            return int(reasons)
    return 0


def _ask(nvml: Any, read: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; None where it has none."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
