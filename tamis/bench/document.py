"""The JSON document of a bench: what was measured, on what, and what is left of it when the bench is interrupted."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tamis
from tamis.run.files.environment import package_versions, recorded_variables
from tamis.run.files.hardware import GpuLost, read_gpus
from tamis.run.files.info import measured_commit
from tamis.run.files.records import utc
from tamis.train.distributed import device_name

INTERRUPTIONS = signal.SIGTERM, signal.SIGINT
NOT_MEASURED = ("notify.", "copy.", "cost.")  # sections that change no figure, and may hold addresses and secrets


def begin_document(bench: str, device: torch.device) -> dict[str, Any]:
    """What a published figure carries: device, date, commit, command and versions. Prints what slows the GPU down."""
    versions = package_versions()
    facts: dict[str, Any] = {
        "bench": bench,
        "device": device_name(device),
        "date": utc()[:10],
        "commit": _commit(),
        "command": shlex.join(
            ["tamis", *(word for word in sys.argv[1:] if not word.lstrip().startswith(NOT_MEASURED))]
        ),
        "variables": recorded_variables(os.environ),
        "torch": torch.__version__,
        "triton": versions["triton"],
    }
    if device.type != "cuda":
        return facts
    with suppress(GpuLost, IndexError):  # of another GPU, or a driver that names none: the figures are right
        gpu = read_gpus()[device.index or 0]
        facts |= {
            "driver": gpu.driver,
            "power_limit_w": gpu.speed.power_limit_w,
            "default_power_limit_w": gpu.speed.default_power_limit_w,
        }
        if gpu.speed.slowed_or_limited:
            print(f"this GPU is {gpu.speed.slowed_or_limited}: others of its model are faster", flush=True)
    return facts


def _commit() -> str:
    root = Path(tamis.__file__).parents[1]
    in_checkout = (root / "pyproject.toml").is_file()  # an installed package may lie in another project's checkout
    return measured_commit(root) if in_checkout else f"tamis {tamis.__version__}"


@contextmanager
def kept_when_interrupted(document: dict[str, Any]) -> Iterator[None]:
    """End the block at Ctrl-C or TERM, which `timeout` sends, without an error, and mark the document.

    A call of a GPU that hangs is not interrupted: `timeout -k 60` kills the bench then. INT is handled too: a program
    that a script runs in the background ignores it otherwise. Python handles signals in its main thread alone.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = INTERRUPTIONS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        document["interrupted"] = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(document: dict[str, Any]) -> int:
    """130, as after Ctrl-C, if the document has only the rows measured before an interruption."""
    return 130 if document.get("interrupted") else 0
