"""NVTX ranges around the parts of a step, and memory snapshots; both off unless asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_nvtx_on = False


def enable_nvtx(on: bool) -> None:
    global _nvtx_on
    _nvtx_on = on and torch.cuda.is_available()


def marked(name: str) -> contextlib.AbstractContextManager[Any]:
    """A named range in a profiler's timeline; balanced whatever happens inside."""
    return torch.cuda.nvtx.range(name) if _nvtx_on else contextlib.nullcontext()
