"""Where the kernel tests run: on the GPU if there is one, else in Triton's interpreter on the CPU, in float32 alone
(the interpreter rounds bfloat16 wrongly). Import this before anything that imports triton."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def relative_rmse(measured: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """`‖measured − expected‖ / ‖expected‖`; infinite where anything is not finite, 0 for two empty or zero tensors.

    `floor` is the least size per element the expected values count as, for gradients that vanish exactly.
    """
    measured, expected = measured.detach().double(), expected.detach().double()
    if not (torch.isfinite(measured).all() and torch.isfinite(expected).all()):
        return float("inf")
    error, size = (measured - expected).norm().item(), max(expected.norm().item(), floor * expected.numel() ** 0.5)
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


def assert_chosen_alike(ids, expected, q, k_cmp, spec, start=0):
    """Ids differ from the expected ones only where the reference's own scores differ by float32 rounding."""
    from tamis.attention import reference

    assert ids.dtype == torch.int32 and ids.shape == expected.shape
    assert torch.equal(ids < 0, expected < 0)
    assert ((ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] < 0)).all(), "ascending, each block once, unused last"
    scores = reference.block_scores(q, k_cmp, spec, start).transpose(1, 2)
    total = [scores.gather(-1, x.clamp(min=0).long()).mul(x >= 0).sum(-1) for x in (ids, expected)]
    torch.testing.assert_close(total[0], total[1], rtol=3e-6, atol=0)
    assert (ids != expected).float().mean() < 0.01


@pytest.fixture
def poisoned_memory():
    """Fresh tensors hold NaN (or the largest whole number), so that a value never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def branch_against_reference(branch, q, k, v, gates, spec, slack=1.0):
    """Hold a dense branch's output and gradients to the reference, the gradients to `slack` times the limit.

    The other dense branch takes part in the pass over the queries, as in training, with no weight: its lse is infinite.
    """
    from tamis.attention import op, reference
    from tamis.attention.kernels import gates as gates_kernels
    from tamis.attention.kernels.banded import keys, queries
    from tamis.attention.kernels.banded.query_gradients import write_query_gradient

    forward, attend, index, band_of, other_band_of = {
        "compressed": (
            op.compressed_forward, reference.compressed_attention, op.COMPRESSED,
            op.compressed_band, op.window_band,
        ),
        "window": (
            op.window_forward, reference.window_attention, op.WINDOW, op.window_band, op.compressed_band,
        ),
    }[branch]  # fmt: skip

    exact = [x.detach().float().requires_grad_() for x in (q, k, v, gates)]
    expected = attend(*exact[:3], spec)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(7)).to(q)
    gradients = torch.autograd.grad(expected * exact[3][..., index : index + 1], exact, dout.float())

    q, k, v, gates = (x.detach() for x in (q, k, v, gates))
    out, lse = forward(q, k, v, spec)
    outs = [torch.zeros_like(out) for _ in range(3)]
    outs[index] = out
    dgates, weights, delta = gates_kernels.mix_backward(dout, *outs, gates)
    rows = queries.Rows(lse, weights[index], delta[index])
    none = torch.zeros_like(lse)
    absent = other_band_of(k, v, spec), queries.Rows(none + float("inf"), none, none)
    present = band_of(k, v, spec), rows
    dqs = [torch.full_like(q, float("nan")) for _ in range(3)]  # whatever is not written stays visible
    for dq, branches in zip(dqs, ([present, absent], [absent, present], [present]), strict=True):
        write_query_gradient(q, dout, dq, present[0].scale, branches)
    dk, dv = keys.key_gradients(q, band_of(k, v, spec), rows, dout)
    measured = {"out": out, "dq": dqs[0], "dk": dk, "dv": dv, "dgates": dgates}
    measured |= {"dq as the second branch": dqs[1], "dq alone": dqs[2]}
    wanted = (expected, *gradients, gradients[0], gradients[0])
    errors = {name: relative_rmse(x, y, floor=0.1) for (name, x), y in zip(measured.items(), wanted, strict=True)}
    limit = LIMIT[q.dtype]
    assert errors["out"] <= limit and max(errors.values()) <= slack * limit, errors
    return out, lse
