"""Settings of the whole suite: one thread per process, and properties that are tried the same way each time."""

import os

# Before torch loads, and inherited by processes tests start: on few cores spinning OpenMP threads starve each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from tamis.config.process import set_process_defaults

set_process_defaults()

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any test imports one

settings.register_profile("tamis", deadline=None, derandomize=True)
settings.load_profile("tamis")
