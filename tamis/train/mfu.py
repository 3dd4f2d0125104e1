"""Model FLOPs utilisation: FLOPs the model needs over the GPU's peak. None for a GPU that is not in the table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tamis.config import Config
from tamis.config.size import flops_per_token

# Dense bf16/fp16 tensor-core peaks from the vendor's data sheets, TFLOP/s. Matched in order: longer names first.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 149.7,
    "A6000": 154.8,
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "V100": 125.0,
}


def peak_tflops(gpu_name: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in gpu_name), None)


class Utilisation:
    """Convert a training rate to a share of one GPU's peak; None where the peak is not known.

    A step's FLOPs depend on the lengths of its sequences or packed documents.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        known = device.type == "cuda" and config.runtime.precision in ("bf16", "fp16")
        self.peak_tflops = peak_tflops(torch.cuda.get_device_name(device)) if known else None
        self._config = config
        self._of_length: dict[int, float] = {}  # FLOPs per token

    def at(self, tokens_per_s: float, lengths: Sequence[int] = ()) -> float | None:
        """The share at this rate, with sequences of these lengths; by default those of the configuration."""
        if self.peak_tflops is None:
            return None
        return tokens_per_s * self._flops_per_token(lengths) / (self.peak_tflops * 1e12)

    def _flops_per_token(self, lengths: Sequence[int]) -> float:
        if not lengths:
            return flops_per_token(self._config)
        for length in set(lengths) - self._of_length.keys():
            self._of_length[length] = flops_per_token(self._config, length=length)
        return sum(self._of_length[length] * length for length in lengths) / sum(lengths)
