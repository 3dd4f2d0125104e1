"""What runs inside or next to a worker: signals, stack dumps, the sidecar process."""
