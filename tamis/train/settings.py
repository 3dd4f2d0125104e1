"""What a configuration asks of PyTorch as a whole: repeatable algorithms, profiler ranges, an audit of attention."""

from __future__ import annotations

import os

import torch
from torch.backends import cuda as sdpa

from tamis.attention.ranges import listen
from tamis.config import Config
from tamis.model.dense_attention import takes_groups
from tamis.train.step import COMPUTE_DTYPE, attention_kernels


def apply_settings(config: Config, device: torch.device) -> list[str]:
    """Set them for this process; a line for each that is not silent. Before the first product on the device."""
    lines = []
    torch.use_deterministic_algorithms(config.runtime.deterministic)
    if config.runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with fixed workspaces
        torch.backends.cudnn.benchmark = False
        lines.append("deterministic: the same inputs give the same bits, at some cost in speed")
    if config.runtime.nvtx:
        listen("nvtx")
        lines.append("NVTX ranges: fetch, forward, the attention branches, backward, optimizer")
        if device.type != "cuda":
            lines[-1] = "NVTX ranges were asked for, but there is no GPU that a profiler could show them on"
    if config.runtime.sdpa_audit:
        lines += sdpa_audit(config, device)
    return lines


def sdpa_audit(config: Config, device: torch.device) -> list[str]:
    """Which of PyTorch's attention kernels may compute the dense twin on this device, and which of them can."""
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
    """By PyTorch's own test of the shape the twin would use; the CPU has no choice to test."""
    if device.type != "cuda":
        return {}
    model, dtype = config.model, COMPUTE_DTYPE[config.runtime.precision]
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
