"""Carries the numbers of a step from the device to the host without making either wait.

On a GPU the copy is asynchronous and read one step later; on a CPU it is there at once.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch
from torch import Tensor

Note = TypeVar("Note")


class Mailbox(Generic[Note]):
    """Numbers on the device, each with a note the host already knows, delivered in order."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.lag = 1 if self.is_cuda else 0  # steps the host may run ahead of the device
        self._pending: deque[tuple[Note, Tensor, torch.cuda.Event | None]] = deque()

    def post(self, note: Note, numbers: Tensor) -> None:
        event = None
        if self.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            numbers = host
        self._pending.append((note, numbers, event))

    def collect(self, keep: int) -> list[tuple[Note, list[float]]]:
        """Everything posted but the newest `keep`, waiting for the device where it must."""
        finished = []
        while len(self._pending) > keep:
            note, numbers, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            finished.append((note, numbers.tolist()))
        return finished
