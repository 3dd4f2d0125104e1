"""Checkpoints: one file, sharded folders, conversion. Written by `train`, read by `train` and `generate`."""
