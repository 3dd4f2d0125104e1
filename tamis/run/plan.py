"""From the GPUs of this machine to a launch plan: which config, how many processes, which NCCL settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tamis.run.files.console import counted
from tamis.run.files.hardware import Gpu

SHOWCASE_CONFIG = "configs/train_showcase.yaml"
# Smallest total memory for each config, as NVML reports it; cards sold as 80 and 40 GB report a little less or more.
CONFIG_BY_MEMORY_MIB = (
    (75_000, "configs/m7c_125m_80g.yaml"),
    (35_000, "configs/m7c_125m_40g.yaml"),
    (0, "configs/m7c_125m_24g.yaml"),
)


@dataclass(frozen=True)
class LaunchPlan:
    """How the workers are started, with the reasons, ready for the supervisor."""

    config_path: str
    processes: int
    environment: dict[str, str]  # only what is added to the user's own
    reasons: list[str]


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


def _reasons(gpus: Sequence[Gpu]) -> list[str]:
    if not gpus:
        return ["no GPU found: one process on the CPU; without a config of your own, the embedded showcase"]
    smallest = min(gpus, key=lambda gpu: gpu.total_mib)
    how = "python" if len(gpus) == 1 else f"torchrun --nproc_per_node={len(gpus)}"
    slower = [f"GPU {gpu.index} is {why}: expect less speed" for gpu in gpus if (why := gpu.speed.slowed_or_limited)]
    return [f"{counted(len(gpus), 'GPU')}: {how}", f"smallest: {smallest.name} with {smallest.total_mib} MiB", *slower]
