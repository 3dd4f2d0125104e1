"""Repeated work in a thread that lives exactly as long as a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(every_s: float, work: Callable[[], object]) -> Iterator[None]:
    """Call `work` every `every_s` seconds while the block runs, never after it."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, daemon=True, name=work.__name__)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
