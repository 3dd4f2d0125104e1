"""Time packed documents against a batch of their length, and a decode call, on a GPU: `python -m tests.gpu.packed`.

M7C's shape, 65,536 tokens, forward and backward, in a CUDA graph and launched one by one with a wait before each call;
the worst difference between a packed row and its documents one by one; the host's time of a decode call. `--decode`
times decode calls alone, with their parts, and `--one-by-one` 32 sequences of 2,048 tokens alone; both take seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tamis.attention import NSASpec, nsa_attention, nsa_decode
from tamis.attention.agreement import relative_rmse
from tamis.attention.checks import check_once
from tamis.attention.decode import _check_step, use_kernels
from tamis.attention.packing import PackedRow

TOKENS, HEADS, GROUPS, DIM = 65536, 12, 2, 64
LENGTHS = (1024, 2048, 8192, 65536)
ODD_LENGTHS = (3000, 1, 17, 5000, 40, 33, 8192, 777, 64, 2048, 31)
ROOM = 8224  # documents that the offsets may hold, most of them empty
SPEC = NSASpec()
Work = Callable[[], Sequence[Tensor]]


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def inputs(batch: int, tokens: int) -> list[Tensor]:
    blocks = SPEC.compressed_blocks(tokens)
    keys = [random_tensor(batch, n, GROUPS, DIM) for n in (blocks, blocks, tokens, tokens, tokens, tokens)]
    return [random_tensor(batch, tokens, HEADS, DIM), *keys, random_tensor(batch, tokens, HEADS, 3)]


def offsets(lengths: Sequence[int], room: int = 0) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    empty = ends[-1:].expand(max(0, room + 1 - len(ends)))
    return torch.cat((ends, empty)).to("cuda", torch.int32)


def fixed_call(length: int) -> Work:
    x = inputs(TOKENS // length, length)
    dout = torch.randn_like(x[0])
    return lambda: torch.autograd.grad(nsa_attention(*x, SPEC), x, dout)


def packed_call(length: int, room: int = 0) -> Work:
    x, row = inputs(1, TOKENS), PackedRow.of(offsets([length] * (TOKENS // length), room), TOKENS, SPEC)
    dout = torch.randn_like(x[0])

    def work() -> Sequence[Tensor]:
        out = nsa_attention(*x, SPEC, cu_seqlens=row, max_seqlen=length)
        return torch.autograd.grad(out, x, dout)

    return work


def milliseconds(work: Work, graph: bool) -> float:
    """The median of eleven calls, each after a wait."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    run: Callable[[], object] = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
    times = []
    for _ in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def queued_milliseconds(work: Work, calls: int = 30) -> float:
    """The mean of calls that do not wait for each other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def worst_difference(lengths: Sequence[int]) -> float:
    """Between a packed row and its documents one by one: the output and all gradients."""
    x = inputs(1, sum(lengths))
    dout = torch.randn_like(x[0])
    packed = nsa_attention(*x, SPEC, cu_seqlens=offsets(lengths, len(lengths) + 5), max_seqlen=max(lengths))
    alone, token, block = [], 0, 0
    for n in lengths:
        row, blocks = slice(token, token + n), slice(block, block + SPEC.compressed_blocks(n))
        rest = [each[:, row] for each in x[3:]]
        alone.append(nsa_attention(x[0][:, row], x[1][:, blocks], x[2][:, blocks], *rest, SPEC))
        token, block = row.stop, blocks.stop
    joined = torch.cat(alone, 1)
    got, wanted = ([out, *torch.autograd.grad(out, x, dout)] for out in (packed, joined))
    return max(relative_rmse(a, b) for a, b in zip(got, wanted, strict=True))


def host_us(work: Callable[[], object]) -> float:
    """The host's time of a call, the median of nine loops; no loop fills the queue of launches."""
    times = []
    with torch.no_grad():
        for _ in range(10):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                work()
            times.append((time.perf_counter() - began) * 1e4)
    return statistics.median(times[1:])


def decode_host(batch: int) -> str:
    q, gates = random_tensor(batch, HEADS, DIM), random_tensor(batch, HEADS, 3)
    kept = [random_tensor(batch, n, 2, GROUPS, DIM) for n in (SPEC.compressed_blocks(TOKENS), TOKENS, SPEC.w)]
    given = (q, *kept, gates, torch.full((batch,), TOKENS - 1, device="cuda"))
    into = nsa_decode(*given, SPEC)[1:]
    parts = {
        "checks": lambda: check_once(_check_step, given, SPEC),
        "choice of kernels": lambda: use_kernels(q, groups=GROUPS),
        "one allocation": lambda: torch.empty(1 << 16, dtype=torch.float32, device="cuda"),
        "call with given tensors for blocks and reads": lambda: nsa_decode(*given, SPEC, into=into),
    }
    cells = ", ".join(f"{name} {host_us(work):.1f}" for name, work in parts.items())
    return f"decode, batch {batch}: host {host_us(lambda: nsa_decode(*given, SPEC)) / 1e3:.3f} ms; in us: {cells}"


def call_one_by_one(length: int = 2048) -> str:
    """The same call from a graph, one by one with a wait before each, and queued; and the host's time for it."""
    work = fixed_call(length)
    graph, alone, queued = milliseconds(work, True), milliseconds(work, False), queued_milliseconds(work)
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    host = (time.perf_counter() - began) * 1e3
    cells = (
        f"{ms:.3f} {how}, {100 * (ms / graph - 1):.1f}% more" for ms, how in ((alone, "one by one"), (queued, "queued"))
    )
    return f"{length} tokens: {graph:.3f} ms in a graph; {'; '.join(cells)}; host {host:.3f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", action="store_true", help="time the host's part of decode calls alone")
    parser.add_argument("--one-by-one", action="store_true", help="time 32 x 2k from a graph and one by one alone")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.decode:
        print(decode_host(1), decode_host(8), sep="\n")
    if chosen.one_by_one:
        print(call_one_by_one())
    if chosen.decode or chosen.one_by_one:
        return
    for lengths in ([2048] * 8, [8192] * 4, ODD_LENGTHS, [37] * 300):
        print(f"{len(lengths):4} documents: worst difference {worst_difference(lengths):.1e}", flush=True)
    for length in LENGTHS:
        calls = {"fixed": fixed_call(length), "packed": packed_call(length), "with room": packed_call(length, ROOM)}
        cells = (f"{name} {milliseconds(w, True):.2f} ({milliseconds(w, False):.2f})" for name, w in calls.items())
        print(f"documents of {length:6}, ms in a graph (one by one): {', '.join(cells)}", flush=True)
    for batch in (1, 8):
        print(decode_host(batch))


if __name__ == "__main__":
    main()
