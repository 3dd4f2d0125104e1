"""What takes long says that it began, and now and then that it still goes on: nobody should wonder whether it hangs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tamis.run.background import repeated

REMIND_EVERY_S = 10.0


@contextmanager
def announced(what: str) -> Iterator[None]:
    """To stderr, so that a document on stdout stays one."""
    began = time.monotonic()

    def remind() -> None:
        _say(f"still {what}, {time.monotonic() - began:.0f} s so far")

    _say(f"{what} …")
    with repeated(REMIND_EVERY_S, remind):
        yield


def _say(text: str) -> None:
    print(f"[tamis] {text}", file=sys.stderr, flush=True)
