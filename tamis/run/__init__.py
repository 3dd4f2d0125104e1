"""Supervision: the run directory and everything that prepares, watches, judges and hands over a run. No torch."""
