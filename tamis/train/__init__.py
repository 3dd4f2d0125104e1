"""Training: loop, optimizer, distribution, checkpoints, guards, telemetry, evaluation."""
