"""Tamis trains language models with Native Sparse Attention, hands off."""

import os

__version__ = "0.1.0"

# Both are read once, when torch loads. Some virtual machines report AMX and then trap it: bf16 on such a CPU kills
# Python. And threads that spin while they wait starve each other as soon as anything else runs.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
