"""Where the kernel tests run: on the GPU if there is one, else in Triton's interpreter on the CPU, in float32 alone
(the interpreter rounds bfloat16 wrongly). Import this before anything that imports triton."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def relative_rmse(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """`‖measured − expected‖ / ‖expected‖`; infinite where anything is not finite, 0 for two empty or zero tensors."""
    measured, expected = measured.detach().double(), expected.detach().double()
    if not (torch.isfinite(measured).all() and torch.isfinite(expected).all()):
        return float("inf")
    error, size = (measured - expected).norm().item(), expected.norm().item()
    return error / size if size else (0.0 if error == 0 else float("inf"))


def random_inputs(spec, batch=1, tokens=50, groups=2, heads_per_group=2, dim=16, dtype=torch.float32, seed=0, scale=1):
    """The arguments of `nsa_attention` but the spec, fresh and requiring gradients; `scale` multiplies the queries."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    blocks, heads = spec.compressed_blocks(tokens), groups * heads_per_group
    lengths = (blocks, blocks, tokens, tokens, tokens, tokens)
    tensors = [normal(batch, tokens, heads, dim) * scale, *(normal(batch, n, groups, dim) for n in lengths)]
    tensors.append(torch.sigmoid(normal(batch, tokens, heads, 3)))
    return [x.to(DEVICE, dtype).requires_grad_() for x in tensors]
