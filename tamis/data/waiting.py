"""Waiting for what may not come: a time limit around a call, and the pauses between attempts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tamis.data.errors import DataError

RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts when the network fails; then it is an error

T = TypeVar("T")


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """The result of a call, or a DataError when it takes too long; a call that hangs is left behind in its thread."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="tamis-data-wait", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise DataError(
            f"{what} did not come within {seconds:g} s: check the network or the disk the data is on, "
            "or raise data.loader_timeout_s (--loader-timeout)"
        )
    result, error = outcome[0]
    if error:
        raise error
    return result  # type: ignore[return-value]
