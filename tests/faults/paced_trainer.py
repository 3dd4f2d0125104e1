"""The real trainer with steps that also wait, as a host waits for its device: a long soak leaves the cores free."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tamis.train.main import main
from tamis.train.step import TrainStep


def wait_in_every_step(seconds: float) -> None:
    step = TrainStep.__call__

    def paced(self: TrainStep, *arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return step(self, *arguments, **options)

    TrainStep.__call__ = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    wait_in_every_step(float(os.environ["STEP_WAITS_S"]))
    sys.exit(main())
