"""Preflight checks of the machine: software, GPUs, disk, limits, clock, loopback. Starts no process."""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tamis.config import Config
from tamis.config.size import CHECKPOINT_BYTES_PER_PARAMETER, flops_per_token, parameter_count
from tamis.run.checks.findings import Criterion, Finding, failed, not_applicable, not_measured, pass_if, passed
from tamis.run.files.directory import RunDirectory
from tamis.run.files.environment import cuda_of_torch, package_versions
from tamis.run.files.hardware import MIB, Gpu, existing_parent, free_disk_mib
from tamis.run.files.lock import RunLock
from tamis.run.limits import CPU_FLOPS_PER_CORE, CPU_HOURS

LOGS_MIB = 1024  # room for heartbeats, TensorBoard and logs
FOREIGN_GPU_MIB = 2048  # more than a driver and a desktop use: another process computes there
OLDEST_PLAUSIBLE_TIME = 1_767_225_600  # 2026-01-01: an earlier date means that the clock is wrong
LEAST_DRIVER_BY_CUDA = {13: 580, 12: 525, 11: 450}  # NVIDIA's minor-version compatibility
LEAST_OPEN_FILES = 1024
SHARED_MEMORY_MIB_PER_GPU = 64


@dataclass(frozen=True)
class Subject:
    """The config, its file and the GPUs that the checks read."""

    config: Config
    config_file: Path  # the resolved config, read by child processes
    gpus: Sequence[Gpu]

    @property
    def out_dir(self) -> Path:
        return Path(self.config.train.out_dir)

    @property
    def needs_gpu(self) -> bool:
        return self.config.runtime.device != "cpu" and (
            bool(self.gpus) or self.config.runtime.device == "cuda" or self.config.runtime.production
        )


def python_and_torch(subject: Subject) -> Finding:
    versions = package_versions()
    found = f"python {sys.version_info.major}.{sys.version_info.minor}, torch {versions['torch']}"
    return pass_if(versions["torch"] is not None and sys.version_info >= (3, 11), found)


def driver_matches_torch(subject: Subject) -> Finding:
    if not subject.needs_gpu:
        return not_applicable("no GPU is used")
    cuda = cuda_of_torch()
    if cuda is None:
        return failed("this torch is built for the CPU only")
    if not subject.gpus:
        return failed(f"torch is built for CUDA {cuda}, but no driver answers")
    driver = subject.gpus[0].driver
    least = LEAST_DRIVER_BY_CUDA.get(int(cuda.split(".")[0]))
    if least is None:
        return not_measured(f"no driver requirement known for CUDA {cuda}; driver {driver}")
    return pass_if(int(driver.split(".")[0]) >= least, f"driver {driver}; CUDA {cuda} of torch needs {least} or newer")


def gpus_are_there_and_free(subject: Subject) -> Finding:
    if not subject.needs_gpu:
        return not_applicable("no GPU: the run uses the CPU")
    if not subject.gpus:
        required_by = (
            "runtime.device is cuda" if subject.config.runtime.device == "cuda" else "runtime.production is true"
        )
        return failed(f"no GPU found, but {required_by}", "use a machine with a GPU, or set runtime.device: cpu")
    listing = "; ".join(_gpu_text(gpu) for gpu in subject.gpus)
    return pass_if(all(gpu.used_mib <= FOREIGN_GPU_MIB for gpu in subject.gpus), listing)


def _gpu_text(gpu: Gpu) -> str:
    words = f"{gpu.index}: {gpu.name} {gpu.free_mib} of {gpu.total_mib} MiB free"
    return f"{words}, {gpu.speed.slowed_or_limited}" if gpu.speed.slowed_or_limited else words


def finishes_in_time(subject: Subject) -> Finding:
    """Refuse a run that a CPU cannot finish within days; GPUs are measured by `tamis estimate`."""
    config = subject.config
    if subject.needs_gpu:
        return not_applicable("the run uses GPUs; tamis estimate measures their speed")
    cores = os.cpu_count() or 1
    flops = flops_per_token(config) * config.tokens_per_step(1) * config.train.steps
    hours = flops / (cores * CPU_FLOPS_PER_CORE) / 3600
    sentence = f"{config.train.steps:,} steps take at least {hours:,.1f} hours on {cores} cores (limit {CPU_HOURS:g})"
    if hours > CPU_HOURS and config.runtime.device == "cpu":
        return not_measured(f"{sentence}, but runtime.device is cpu: the CPU was asked for")
    return pass_if(hours <= CPU_HOURS, sentence)


def disk_for_checkpoints(subject: Subject) -> Finding:
    train = subject.config.train
    kept = train.keep_checkpoints or math.ceil(train.steps / train.save_every)
    one = parameter_count(subject.config) * CHECKPOINT_BYTES_PER_PARAMETER / MIB
    needed = (
        math.ceil((kept + 1) * one) + LOGS_MIB
    )  # one more than kept: the next is written before the oldest is removed
    free = free_disk_mib(subject.out_dir)
    return pass_if(free >= needed, f"{free} MiB free, {needed} MiB needed for {kept} checkpoints of {one:.0f} MiB")


def out_dir_is_writable(subject: Subject) -> Finding:
    existing = existing_parent(subject.out_dir)
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            skew = os.stat(file.name).st_mtime - time.time()
    except OSError as error:
        return failed(f"{existing}: {error.strerror}")
    # .HALT files are compared by modification time: a file server with a wrong clock makes them look stale.
    return pass_if(abs(skew) < 5, f"{existing} can be written; its clock differs by {abs(skew):.1f} s (limit 5 s)")


def out_dir_has_no_owner(subject: Subject) -> Finding:
    lock = RunLock(RunDirectory(subject.out_dir).lock)
    if lock.is_held():
        owner = lock.owner() or {}
        return failed(f"{subject.out_dir} belongs to process {owner.get('pid')} ({owner.get('purpose')})")
    return passed(f"{subject.out_dir} has no owner")


def clock_is_sane(subject: Subject) -> Finding:
    return pass_if(time.time() > OLDEST_PLAUSIBLE_TIME, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def limits_are_wide_enough(subject: Subject) -> Finding:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = parameter_count(subject.config) * CHECKPOINT_BYTES_PER_PARAMETER
    enough = _at_least(files, LEAST_OPEN_FILES) and _at_least(size, checkpoint)
    return pass_if(enough, f"open files {_limit(files)} (at least {LEAST_OPEN_FILES}), file size {_limit(size)}")


def shared_memory_is_large_enough(subject: Subject) -> Finding:
    if len(subject.gpus) < 2:
        return not_applicable("fewer than two GPUs: NCCL needs no shared memory")
    free = shutil.disk_usage("/dev/shm").free // MIB
    needed = SHARED_MEMORY_MIB_PER_GPU * len(subject.gpus)
    return pass_if(free >= needed, f"/dev/shm has {free} MiB free, {needed} MiB needed")


def loopback_works(subject: Subject) -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
            return passed(f"connected to 127.0.0.1 port {server.getsockname()[1]}")
    except OSError as error:
        return failed(f"no connection over 127.0.0.1: {error}")


def _at_least(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


MACHINE_CHECKS = (
    Criterion("Python and torch", python_and_torch, "run bash scripts/prime_bootstrap.sh"),
    Criterion(
        "driver matches torch",
        driver_matches_torch,
        "install a newer driver, or a torch built for this one (bash scripts/prime_bootstrap.sh)",
    ),
    Criterion(
        "GPUs are there and free", gpus_are_there_and_free, "stop the processes that nvidia-smi lists, then check again"
    ),
    Criterion(
        "the device can finish the run",
        finishes_in_time,
        "use a machine with a GPU, lower train.steps or the model's size, or set runtime.device: cpu to insist",
    ),
    Criterion(
        "disk holds the checkpoints",
        disk_for_checkpoints,
        "free space, lower train.keep_checkpoints, or point train.out_dir at a larger disk",
    ),
    Criterion(
        "out_dir can be written", out_dir_is_writable, "change train.out_dir, its permissions, or the clock of the disk"
    ),
    Criterion("out_dir has no other owner", out_dir_has_no_owner, "halt the other run, or change train.out_dir"),
    Criterion("clock is sane", clock_is_sane, "set the clock (timedatectl set-ntp true)"),
    Criterion("process limits", limits_are_wide_enough, "raise them: ulimit -n 65536; ulimit -f unlimited"),
    Criterion("shared memory", shared_memory_is_large_enough, "start the container with --shm-size=1g or --ipc=host"),
    Criterion("loopback network", loopback_works, "bring up the lo interface; a firewall must let 127.0.0.1 through"),
)
