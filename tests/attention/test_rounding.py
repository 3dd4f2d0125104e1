"""Where the error of gradients with queries × 30 in bfloat16 comes from, by rounding one thing at a time."""

import torch
from torch import Tensor

HEADS, TOKENS, DIM = 4, 256, 64


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def query_gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, round_out: bool, round_rest: bool) -> Tensor:
    """As the kernels compute it: `delta` from the forward pass's output, then `p · (dP − delta)` times the keys."""
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    p = (q @ k.T * DIM**-0.5).masked_fill(future, float("-inf")).softmax(-1)
    out = p @ v
    delta = (dout * (rounded(out) if round_out else out)).sum(-1, keepdim=True)
    ds = p * (dout @ v.T - delta)
    dq = (rounded(ds) if round_rest else ds) @ k * DIM**-0.5
    return rounded(dq) if round_rest else dq


def errors(scale: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, TOKENS, DIM), (TOKENS, DIM), (TOKENS, DIM), (HEADS, TOKENS, DIM))
    q, k, v, dout = (rounded(torch.randn(shape, generator=generator)) for shape in shapes)
    q = rounded(q * scale)
    exact = query_gradient(q, k, v, dout, False, False)
    within_half_a_bit = 1 + 2**-9 * (2 * torch.rand(q.shape, generator=generator, dtype=torch.float64) - 1)
    cases = {
        "all": query_gradient(q, k, v, dout, True, True),
        "all but the output": query_gradient(q, k, v, dout, False, True),
        "the output alone": query_gradient(q, k, v, dout, True, False),
        "the queries alone": query_gradient(q * within_half_a_bit, k, v, dout, False, False),
    }
    return {name: ((dq - exact).norm() / exact.norm()).item() for name, dq in cases.items()}


def test_of_ordinary_queries_every_rounding_stays_within_the_limit() -> None:
    assert max(errors(scale=1).values()) < 5e-3


def test_of_large_queries_the_rounded_output_alone_passes_the_limit_and_the_queries_own_rounding_weighs_more() -> None:
    found = errors(scale=30)
    assert found["all but the output"] < 5e-3 < found["the output alone"] < found["all"] < 1e-2
    assert found["the queries alone"] > 2 * found["all"]
