"""Native Sparse Attention as a library: functions, a layer, decoding, and a check against the reference."""

from tamis.attention.decode import nsa_decode
from tamis.attention.functional import nsa, nsa_attention, select_blocks
from tamis.attention.layer import NSAAttention
from tamis.attention.spec import NSASpec
from tamis.attention.verify import verify

__all__ = ["NSAAttention", "NSASpec", "nsa", "nsa_attention", "nsa_decode", "select_blocks", "verify"]
