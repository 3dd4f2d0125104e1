"""Native Sparse Attention; knows nothing of models or training."""

from tamis.attention.functional import nsa_attention, select_blocks
from tamis.attention.spec import NSASpec

__all__ = ["NSASpec", "nsa_attention", "select_blocks"]
