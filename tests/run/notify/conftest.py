"""Receivers end with their test, and messages do not wait as long as in a real night."""

from collections.abc import Callable, Iterator

import pytest

from tamis.run.notify import delivery, notifier
from tests.run.notify.receiver import Receiver


@pytest.fixture
def receiving() -> Iterator[Callable[..., Receiver]]:
    started: list[Receiver] = []

    def start(*answers: int) -> Receiver:
        started.append(Receiver(*answers))
        return started[-1]

    yield start
    for receiver in started:
        receiver.close()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_S", 30.0)  # a busy machine that answers late gets no message twice
    monkeypatch.setattr(delivery, "BACK_OFF_S", (0.05, 0.05, 0.05))
    monkeypatch.setattr(notifier, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(notifier, "FLUSH_S", 30.0)
    monkeypatch.delenv("TAMIS_NOTIFY", raising=False)
