"""Process-wide settings of PyTorch from the configuration: determinism, NVTX ranges, an audit of SDPA."""

from __future__ import annotations

import os

import torch
from torch.backends import cuda as sdpa

from tamis.config import Config
from tamis.model import DTYPES
from tamis.model.dense import takes_groups
from tamis.train.step import attention_kernels


def apply_settings(config: Config, device: torch.device) -> list[str]:
    """Apply the settings; returns a line to print for each. Call it before the first operation on the device."""
    lines = []
    if config.runtime.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.runtime.deterministic)  # loads the compiler, which takes seconds
    if config.runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed for deterministic cuBLAS
        torch.backends.cudnn.benchmark = False
        lines.append("deterministic: the same inputs give the same bits, at some cost in speed")
    if config.runtime.nvtx:
        if device.type == "cuda":
            torch.autograd.profiler.emit_nvtx().__enter__()  # never left: ranges last as long as the process
            lines.append("NVTX ranges: fetch, forward, the attention branches, backward, optimizer")
        else:
            lines.append("NVTX ranges are on, but there is no GPU for a profiler to show them on")
    if config.runtime.sdpa_audit:
        lines += sdpa_audit(config, device)
    return lines


def sdpa_audit(config: Config, device: torch.device) -> list[str]:
    """Describe which PyTorch attention kernels are allowed for the dense twin, and which support its shape here."""
    lines = []
    if config.model.attention == "nsa":
        lines.append("SDPA audit: NSA layers use none of PyTorch's attention kernels; the dense twin would choose so:")
    with attention_kernels(config):
        allowed = {
            "cuDNN": sdpa.cudnn_sdp_enabled(),
            "flash": sdpa.flash_sdp_enabled(),
            "memory-efficient": sdpa.mem_efficient_sdp_enabled(),
            "math": sdpa.math_sdp_enabled(),
        }
        able = _able(config, device)
    for name, is_allowed in allowed.items():
        can = "" if able.get(name) is None else f", {'can' if able[name] else 'cannot'} compute this shape here"
        lines.append(f"SDPA audit: {name} attention is {'allowed' if is_allowed else 'not allowed'}{can}")
    return lines


def _able(config: Config, device: torch.device) -> dict[str, bool]:
    """Ask PyTorch which kernels support the dense twin's shape; empty on a CPU, where there is no choice."""
    if device.type != "cuda":
        return {}
    model, dtype = config.model, DTYPES[config.runtime.precision]
    q, k = (
        torch.empty(1, heads, min(config.train.seq_len, 2048), model.d_k, dtype=dtype, device=device)
        for heads in (model.n_heads, model.n_kv_groups)
    )
    k = k if takes_groups(q) else q
    shape = sdpa.SDPAParams(q, k, k, None, 0.0, True, k is not q)
    return {
        "cuDNN": sdpa.can_use_cudnn_attention(shape),
        "flash": sdpa.can_use_flash_attention(shape),
        "memory-efficient": sdpa.can_use_efficient_attention(shape),
        "math": True,
    }
