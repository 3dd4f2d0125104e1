"""The language model: decoder, dense attention, norm, feed-forward and loss. Single-device code."""

import torch

from tamis.model.decoder import Decoder

__all__ = ["DTYPES", "Decoder"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # by the names in runtime.precision
