"""Peak memory of forward + backward above the inputs, counted without a GPU: kernels are not run, every tensor is made.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.attention.counted_memory 65536`; prints GiB.
No allocation depends on data, so the count is what a GPU's allocator hands out (it matched one to the third digit).
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime.jit import JITFunction


def peak_gib(length: int, tokens: int = 65536, heads: int = 12, groups: int = 2, dim: int = 64) -> float:
    from tamis.attention import op
    from tamis.attention.spec import NSASpec

    JITFunction.run = lambda self, *args, **kwargs: None
    spec, batch = NSASpec(), tokens // length
    blocks = spec.compressed_blocks(length)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=torch.bfloat16).requires_grad_()

    keys = [empty(n, groups, dim) for n in (blocks, blocks, length, length, length, length)]
    inputs = [empty(length, heads, dim), *keys, empty(length, heads, 3)]
    dout = torch.empty_like(inputs[0])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out = op.nsa_forward(*inputs, op.as_numbers(spec))[0]
        torch.autograd.grad(out, inputs, dout)
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / 2**30


if __name__ == "__main__":
    print(peak_gib(int(sys.argv[1])))
