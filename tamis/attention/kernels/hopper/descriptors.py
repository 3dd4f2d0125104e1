"""Descriptors of tensors, by which the tensor memory accelerator copies tiles for the kernels in Gluon.

A tensor is `[B,tokens,heads,D]`. Copies end with their sequence: what lies beyond is copied as zeros, and not written.
A copy begins at a multiple of 16 bytes, or the GPU stops with an illegal instruction.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tamis.attention.kernels.launch import PASSED_ON

BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
PASSED_ON.add(TensorDescriptor)


def described_boxes(x: Tensor, tokens: int, heads: int) -> TensorDescriptor:
    """Boxes of several tokens and heads, token by token."""
    B, S, H, D = x.shape
    return _descriptor(x, [B, S, H, D], [_batch_stride(x), x.stride(1), D, 1], [1, tokens, heads, D], BOX)


def described_heads(x: Tensor) -> TensorDescriptor:
    """Boxes of 64 tokens of one head."""
    B, S, H, D = x.shape
    return _descriptor(x, [B, S, H * D], [_batch_stride(x), x.stride(1), 1], [1, 64, D], TILE)


def described_lines(x: Tensor) -> TensorDescriptor:
    """Lines of 64 numbers of one head, of `[B,H,S]`; where S is no multiple of four, heads are first moved apart."""
    B, H, S = x.shape
    if S % 4:
        x = F.pad(x, (0, -S % 4))
    return _descriptor(x, [B * H, S], [x.shape[2], 1], [1, 64], LINE)


def _batch_stride(x: Tensor) -> int:
    """A batch of one has any stride."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> TensorDescriptor:
    """As the constructor, without its checks: `specializes_warps` has made them, and these took most of its time."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, shape, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor
