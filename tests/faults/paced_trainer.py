"""The real trainer with steps that also wait, as a host waits for its device.

With STEP_WAITS_S each step does, so that a long soak leaves the cores free. With HOLD_AT that one does, until
OUT/go_on is there, so that a test acts in the middle of a run however slow the machine is.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # as the trainer's own entry does while it imports

from tamis.train.main import main
from tamis.train.step import TrainStep


def wait_in_steps(seconds: float, hold_at: int, go_on: Path) -> None:
    step = TrainStep.__call__

    def paced(self: TrainStep, tokens: Any, number: int, *arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        while number == hold_at and not go_on.exists():
            time.sleep(0.01)
        return step(self, tokens, number, *arguments, **options)

    TrainStep.__call__ = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401

    gc.freeze()
    gc.enable()
    out = Path(sys.argv[sys.argv.index("--config") + 1]).parent
    wait_in_steps(float(os.environ.get("STEP_WAITS_S", "0")), int(os.environ.get("HOLD_AT", "0")), out / "go_on")
    sys.exit(main())
