"""Fused operations of the model, each next to its Triton kernel: norm, SwiGLU, heads and rotary, loss, cache writes."""
