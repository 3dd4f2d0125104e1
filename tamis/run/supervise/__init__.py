"""Start, watch, stop and restart the workers of a run."""
