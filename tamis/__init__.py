"""Tamis trains language models with Native Sparse Attention, hands off."""

import os

__version__ = "0.1.0"

# Some virtual machines report AMX and then trap it: bf16 on such a CPU kills Python. Must be set before torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
