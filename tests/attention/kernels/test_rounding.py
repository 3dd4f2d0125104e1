"""Where the error of gradients with queries × 30 in bfloat16 comes from, by rounding one thing at a time."""

import torch
from torch import Tensor

HEADS, TOKENS, DIM = 4, 256, 64


def rounded(x: Tensor, really: bool = True) -> Tensor:
    return x.bfloat16().double() if really else x


def query_gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *what: str) -> Tensor:
    """As the kernels compute it, rounding `what`: `delta` from the forward pass's output, then `p · (dP − delta)` times
    the keys. P is rounded before it is normalised, when its largest is 1 and so loses nothing."""
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    s = (q @ k.T * DIM**-0.5).masked_fill(future, float("-inf"))
    weight = (s - s.amax(-1, keepdim=True)).exp()
    total = weight.sum(-1, keepdim=True)
    out = rounded(rounded(weight, "P" in what) @ v / total, "output" in what)
    delta = (dout * out).sum(-1, keepdim=True)
    ds = rounded(weight / total * (dout @ v.T - delta), "gradients" in what)
    return rounded(ds @ k * DIM**-0.5, "gradients" in what)


def errors(scale: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, TOKENS, DIM), (TOKENS, DIM), (TOKENS, DIM), (HEADS, TOKENS, DIM))
    q, k, v, dout = (rounded(torch.randn(shape, generator=generator)) for shape in shapes)
    q = rounded(q * scale)
    exact = query_gradient(q, k, v, dout)
    within_half_a_bit = 1 + 2**-9 * (2 * torch.rand(q.shape, generator=generator, dtype=torch.float64) - 1)
    cases = {
        "all": query_gradient(q, k, v, dout, "P", "output", "gradients"),
        "all but the output": query_gradient(q, k, v, dout, "P", "gradients"),
        "the output alone": query_gradient(q, k, v, dout, "output"),
        "P alone": query_gradient(q, k, v, dout, "P"),
        "the queries alone": query_gradient(q * within_half_a_bit, k, v, dout),
    }
    return {name: ((dq - exact).norm() / exact.norm()).item() for name, dq in cases.items()}


def test_of_ordinary_queries_every_rounding_stays_within_the_limit() -> None:
    assert max(errors(scale=1).values()) < 5e-3


def test_of_large_queries_the_rounded_output_alone_passes_the_limit_and_the_queries_own_rounding_weighs_more() -> None:
    found = errors(scale=30)
    assert found["all but the output"] < 5e-3 < found["the output alone"] < found["all"] < 1e-2
    assert found["the queries alone"] > 2 * found["all"]
    assert 0 < found["P alone"] < found["the output alone"] / 5
