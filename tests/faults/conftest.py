"""Launches under test are ended with the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launched import Launched, tiny_config


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*, steps: int = 30, **arguments: Any) -> Launched:
        started.append(Launched(tiny_config(tmp_path / "out", steps), **arguments))
        return started[-1]

    yield start
    for launched in started:
        launched.end()
