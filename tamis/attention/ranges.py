"""Named ranges in a profiler's timeline: for NVIDIA's tools, for PyTorch's own, or none at all.

Balanced whatever happens inside, and nothing but a comparison when nobody is looking.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch

Listener = Literal["none", "nvtx", "torch"]
_listener: Listener = "none"


def listen(listener: Listener) -> None:
    """Who is told of the ranges from now on. NVTX needs a GPU; without one it stays silent."""
    global _listener
    _listener = "none" if listener == "nvtx" and not torch.cuda.is_available() else listener


def marked(name: str) -> contextlib.AbstractContextManager[Any]:
    if _listener == "nvtx":
        return torch.cuda.nvtx.range(name)
    return torch.profiler.record_function(name) if _listener == "torch" else contextlib.nullcontext()
