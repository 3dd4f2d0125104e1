"""The whole operation by kernels: agreement with the reference, strides, repeats, refusals, compile, CUDA graphs."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.devices import DEVICE, DTYPES, LIMIT, poisoned_memory, random_inputs, relative_rmse  # isort: skip
from tamis.attention import NSASpec, nsa_attention, op, reference, select_blocks
from tamis.attention import functional as backend
from tamis.attention.kernels import launch, tape
from tamis.attention.spec import as_numbers

SMALL = NSASpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
TINY = {"tokens": 45, "groups": 1, "heads_per_group": 2}
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
__all__ = ["poisoned_memory"]


def out_and_gradients(attend, inputs, dout):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_kernels(*inputs):
    return nsa_attention(*inputs, SMALL, backend="triton")


def by_reference(*inputs):
    return reference.nsa_attention(*inputs, SMALL)


def assert_agrees(inputs):
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(3)).to(inputs[0])
    expected = out_and_gradients(by_reference, [x.float() for x in inputs], dout.float())
    measured = out_and_gradients(by_kernels, inputs, dout)
    errors = [relative_rmse(x, y) for x, y in zip(measured, expected, strict=True)]
    assert max(errors) <= LIMIT[inputs[0].dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 61, "groups": 2, "heads_per_group": 6},
        {"tokens": 7},
        {"tokens": 34, "batch": 2, "heads_per_group": 1},
    ],
    ids=["group of 6", "shorter than a block", "group of 1, batch of 2"],
)
def test_output_and_all_gradients_agree_with_the_reference(poisoned_memory, dtype, shape):
    assert_agrees(random_inputs(SMALL, dtype=dtype, **shape))


def test_gates_may_be_zero_or_negative(poisoned_memory):
    *inputs, gates = random_inputs(SMALL, **TINY)
    signed = torch.randn(gates.shape, generator=torch.Generator().manual_seed(5)).to(gates)
    signed[:, ::3] = 0
    assert_agrees([*inputs, signed])


def test_strided_inputs_and_gradients_need_no_copy_by_the_caller(poisoned_memory):
    inputs = random_inputs(SMALL, **TINY)
    plain = by_kernels(*inputs)
    plain_gradients = torch.autograd.grad(plain.sum(), inputs)  # its gradient is one number, expanded
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    strided[1] = torch.stack([inputs[1].detach(), inputs[2].detach()], dim=3)[:, :, :, 0]  # a slice of a fused tensor
    strided[3] = inputs[3].detach().transpose(2, 3).contiguous().transpose(2, 3)  # not even the last stride is 1
    strided = [x.requires_grad_() for x in strided]
    out = by_kernels(*strided)
    assert torch.equal(out, plain)
    for got, want in zip(torch.autograd.grad(out.sum(), strided), plain_gradients, strict=True):
        assert torch.equal(got, want)


def test_the_same_inputs_give_the_same_bits(poisoned_memory):
    inputs = random_inputs(SMALL, **TINY)
    first, second = (out_and_gradients(by_kernels, inputs, inputs[0].detach()) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


class RecordedCalls(TorchDispatchMode):
    """The names of the operations that run, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_backward_makes_no_gradients_of_zeros_for_outputs_that_are_not_used():
    """The op also returns what its backward needs; zeros for those would cost 0.3 GiB at 64k tokens."""
    inputs = random_inputs(SMALL, tokens=9, groups=1, heads_per_group=2)
    with RecordedCalls():  # a dispatch mode sees the registered operations
        out = by_kernels(*inputs)
    with RecordedCalls() as recorded:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert any("nsa_backward" in name for name in recorded.names)
    assert not any("zeros" in name for name in recorded.names), recorded.names


def test_a_profiler_shows_the_branches_by_name():
    inputs = random_inputs(SMALL, tokens=9, groups=1, heads_per_group=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        by_kernels(*inputs)
    assert {"compressed", "selection", "selected", "window"} <= {event.name for event in profiler.events()}


def test_compiles_without_a_graph_break(poisoned_memory):
    inputs = random_inputs(SMALL, **TINY)
    compiled = torch.compile(by_kernels, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    dout = inputs[0].detach()
    plain, traced = (out_and_gradients(f, inputs, dout) for f in (by_kernels, compiled))
    assert all(torch.equal(x, y) for x, y in zip(plain, traced, strict=True))


def test_fake_implementations_agree_with_the_real_ones():
    inputs = [x.detach() for x in random_inputs(SMALL, tokens=9, groups=1, heads_per_group=2)]
    numbers = as_numbers(SMALL)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op.nsa_forward, (*inputs, numbers), test_utils=checks)
    torch.library.opcheck(op.select_blocks, (*inputs[:2], numbers), test_utils=checks[:2])
    dout, *saved = op.run_forward(*inputs, numbers)
    of_gates = (dout, *saved[:3], inputs[-1])
    torch.library.opcheck(op.nsa_gate_gradients, of_gates, test_utils=checks[:2])
    _, planes = op.run_gate_gradients(*of_gates)
    torch.library.opcheck(op.nsa_backward, (dout, *inputs, *saved[3:], planes, numbers), test_utils=checks[:2])


def test_backward_frees_the_branches_outputs_unless_the_graph_is_retained(monkeypatch):
    """They take 0.3 GiB at 64k tokens, and only the gradient of the gates needs them."""
    inputs = random_inputs(SMALL, tokens=9, groups=1, heads_per_group=2)
    of_gates, rest, alive = op.gate_gradients, op.repeat, []

    def first(dout, *tensors):
        held.extend(StorageWeakRef(x.untyped_storage()) for x in tensors[:3])
        return of_gates(dout, *tensors)

    def then(call, *arguments):
        gc.collect()  # Triton's interpreter leaves cycles
        alive.append([not storage.expired() for storage in held])
        return rest(call, *arguments)

    out, expected = by_kernels(*inputs), None
    monkeypatch.setattr(op, "gate_gradients", first)
    monkeypatch.setattr(op, "repeat", then)
    for retained in (True, False):
        held: list[StorageWeakRef] = []
        measured = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=retained)
        expected = expected or measured
        assert all(torch.equal(x, y) for x, y in zip(measured, expected, strict=True))
    assert alive == [[True] * 3, [False] * 3]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def test_kernels_where_they_cannot_run_are_refused_with_the_reason(monkeypatch):
    inputs = random_inputs(SMALL, tokens=9)
    with pytest.raises(ValueError, match=r"cannot run here: the kernels take bfloat16, float16, float32, not float64"):
        select_blocks(inputs[0].double(), inputs[1].double(), SMALL, backend="triton")
    wide = random_inputs(SMALL, tokens=9, dim=300)
    with pytest.raises(ValueError, match="head dims up to 256, not 300"):
        nsa_attention(*wide, SMALL, backend="triton")
    odd = random_inputs(SMALL, tokens=9, dim=24)
    with pytest.raises(ValueError, match="multiples of 16 as head dims up to 256, not 24"):
        nsa_attention(*odd, SMALL, backend="triton")
    for shape, most in (({"dim": 144, "heads_per_group": 33}, 32), ({"heads_per_group": 65}, 64)):
        wide = random_inputs(SMALL, tokens=9, groups=1, **shape)
        with pytest.raises(ValueError, match=f"up to {most} query heads per group"):
            nsa_attention(*wide, SMALL, backend="triton")
    with pytest.raises(ValueError, match=r"backend must be .* got 'cuda'"):
        nsa_attention(*inputs, SMALL, backend="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="the tensors are on cpu, not on a CUDA GPU"):
        nsa_attention(*(x.cpu() for x in inputs), SMALL, backend="triton")
    monkeypatch.setattr(backend, "HAVE_TRITON", False)
    with pytest.raises(ValueError, match="Triton is not installed"):
        nsa_attention(*inputs, SMALL, backend="triton")


def test_the_choice_is_announced_with_its_reason(monkeypatch):
    interpreted = backend.describe("cpu", torch.bfloat16, 64)
    assert interpreted.startswith("attention: reference in plain PyTorch, because ")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    printed = backend.describe("cpu", torch.float32, 64)
    assert printed == "attention: reference in plain PyTorch, because the tensors are on cpu, not on a CUDA GPU"
    if DEVICE == "cuda":
        assert backend.describe("cuda", torch.bfloat16, 64).startswith("attention: Triton kernels on NVIDIA")


def test_auto_on_the_cpu_is_the_reference():
    inputs = [x.cpu() for x in random_inputs(SMALL, tokens=20)]
    assert torch.equal(nsa_attention(*inputs, SMALL), reference.nsa_attention(*inputs, SMALL))


@pytest.mark.gpu
@needs_gpu
def test_a_cuda_graph_replays_forward_and_backward():
    spec = NSASpec()
    inputs = random_inputs(spec, tokens=1500, heads_per_group=6, dim=64, dtype=torch.bfloat16)

    def step():
        out = nsa_attention(*inputs, spec)
        # A result that kept its graph alive would keep the leaves' nodes, and with them the stream of the first call.
        return out.detach(), *torch.autograd.grad(out, inputs, inputs[0].detach())

    for _ in range(2):  # compile outside the capture
        expected = step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("length", [2048, 16384, 65536])
def test_peak_memory_of_64k_tokens_stays_under_its_limit(length):
    spec, shape = NSASpec(), {"batch": 65536 // length, "tokens": length, "heads_per_group": 6, "dim": 64}
    inputs = random_inputs(spec, dtype=torch.bfloat16, **shape)
    dout = torch.randn_like(inputs[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(nsa_attention(*inputs, spec), inputs, dout)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * 2**30


@needs_gpu
@pytest.mark.parametrize("graph", [False, True])
def test_branches_next_to_each_other_give_the_bits_of_one_after_the_other(monkeypatch, graph):
    spec = NSASpec()
    for round_ in range(6):  # what a call allocates on either stream is free for the next one
        inputs = random_inputs(spec, tokens=1800 + 700 * round_, heads_per_group=6, dim=64, dtype=torch.bfloat16)
        dout = torch.randn_like(inputs[0])
        with monkeypatch.context() as patch:
            patch.setattr(launch, "MOST_SIDE_TOKENS", 0)
            expected = out_and_gradients(lambda *x: nsa_attention(*x, spec), inputs, dout)
        tape.forget()
        out_and_gradients(lambda *x: nsa_attention(*x, spec), inputs, dout)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded) if graph else nullcontext():
            measured = out_and_gradients(lambda *x: nsa_attention(*x, spec), inputs, dout)
        if graph:
            recorded.replay()
        torch.cuda.synchronize()
        for x, y in zip(measured, expected, strict=True):
            assert torch.equal(x, y)
