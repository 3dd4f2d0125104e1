"""Repeated work in a thread, and signal handlers, that live exactly as long as a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tamis.run.files.console import say


@contextmanager
def repeated(every_s: float, work: Callable[[], object]) -> Iterator[None]:
    """Call `work` every `every_s` seconds while the block runs, never after it.

    An error is printed, once while it stays the same, and the next call comes as if there had been none.
    """
    done = threading.Event()

    def repeat() -> None:
        printed = ""
        while not done.wait(every_s):
            try:
                work()
            except Exception as error:  # a full disk may have room at the next call
                if printed != (problem := f"{work.__name__} failed and is tried again: {error!r}"):
                    say(problem)
                printed = problem

    thread = threading.Thread(target=repeat, daemon=True, name=work.__name__)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def signals_handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handle these signals while the block runs; the handlers from before come back after it."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
