"""What must never go on: numbers that are not finite, and a loss that no honest model could reach."""

from __future__ import annotations

import math

from tamis.config import Config

FLOOR_MARGIN = 0.1  # nats; sampling noise of a batch's loss stays far below it
SCALER_PATIENCE = 20  # fp16 skips single steps while it looks for its loss scale; this many in a row is an anomaly


class Anomaly(Exception):
    """Training must stop, and nothing may be saved any more; `kind` goes to `.anomaly_type`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Guard:
    def __init__(self, config: Config, is_synthetic: bool) -> None:
        # Nobody can predict uniform random tokens: a loss below ln V means that the target leaks into the input.
        self.floor = math.log(config.vocab_size) - FLOOR_MARGIN if is_synthetic else 0.0
        self.patience = SCALER_PATIENCE if config.runtime.precision == "fp16" else 1
        self.skipped = 0

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        if not math.isfinite(loss):
            raise Anomaly("non_finite_loss", f"loss is {loss} at step {step}")
        if loss < self.floor:
            raise Anomaly("loss_below_floor", f"loss {loss:.4f} on random tokens at step {step} is below ln V: a leak")
        self.skipped = 0 if math.isfinite(grad_norm) else self.skipped + 1
        if self.skipped >= self.patience:
            raise Anomaly("non_finite_gradient", f"gradient norm is {grad_norm} at step {step}")
