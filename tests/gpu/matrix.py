"""Every combination the kernels accept, in small, against the reference on a GPU: `python -m tests.gpu.matrix`.

Head dims 16 to 256 by 16 in every dtype, 1 to 64 heads per group, odd and even lengths, both forms of the selected
branch, 3 to 64 chosen blocks, large logits, gates of both signs, packed documents, and batches of more than 2^31
elements; outputs and all gradients. The full product would take hours, so every dim meets every dtype, and group sizes
are spread over the dims; head dims 64 and 128, which have kernels of their own on Hopper, meet them all. Workers
compile and run their cases in parallel. Prints the worst error of each dtype, then one line of JSON. With `--dim N`,
which can be repeated, only the cases of these head dims run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

DIMS = tuple(range(16, 257, 16))
HEADS_PER_GROUP = (1, 2, 3, 4, 6, 8, 16, 32, 64)
OTHER_GROUPS = {64: (), 128: (5, 10, 12)}  # that boxes of rows on Hopper take in other ways
DTYPES = ("bfloat16", "float16", "float32")
LIMIT = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5}
LARGE_LOGITS, SLACK_OF_LARGE_LOGITS = 30.0, 2.0  # delta comes from an output rounded to half precision
CHOSEN = 4  # blocks, so that a length of 1,349 takes both forms of the selected branch
DOCUMENTS = (1, 700, 40, 9, 1300, 1, 131)  # lengths of a packed row
NAMES = ("out", "dq", "dk_cmp", "dv_cmp", "dk_sel", "dv_sel", "dk_win", "dv_win", "dgates")


@dataclass(frozen=True)
class MatrixCase:
    dtype: str
    dim: int
    heads_per_group: int
    tokens: int = 1349
    batch: int = 1
    scale: float = 1.0  # of the queries
    chosen: int = CHOSEN
    packed: int = 0  # how often the row repeats DOCUMENTS
    signed_gates: bool = False  # a part is negative, a part 0
    check_last: bool = False  # compare only the last sequence: the reference would not fit

    @property
    def groups(self) -> int:
        return 1 if self.heads_per_group == 64 else 2


def all_cases() -> list[MatrixCase]:
    spread = len(HEADS_PER_GROUP)
    cases = []
    for i, dim in enumerate(DIMS):
        for j, dtype in enumerate((*DTYPES, "bfloat16")):
            even = (i + j) % 3 == 0
            heads = HEADS_PER_GROUP[(i + 3 * j + (j == 3)) % spread]
            if dtype == "float32" and dim > 128:
                heads = min(heads, 32)  # more are refused
            cases.append(MatrixCase(dtype, dim, heads, tokens=1280 if even else 1349, batch=2 if even else 1))
    cases += [MatrixCase(dtype, dim, 6, scale=LARGE_LOGITS) for dtype in DTYPES for dim in (64, 128, 256)]
    cases += [
        MatrixCase(DTYPES[i % 2], dim, heads, tokens=1349 - i, batch=3, signed_gates=True)
        for dim in (64, 128)
        for i, heads in enumerate((*HEADS_PER_GROUP, *OTHER_GROUPS[dim]))
    ]
    # So many tokens that head dim 64 takes other kernels, and that the window is last.
    cases += [
        MatrixCase(DTYPES[i % 2], dim, heads, tokens=1349 - i, batch=26, check_last=True)
        for i, (dim, heads) in enumerate([(64, heads) for heads in (*HEADS_PER_GROUP, 5)] + [(128, 16), (128, 6)])
    ]
    shapes = ((64, 6), (64, 3), (128, 16), (128, 6), (96, 3), (256, 2))
    cases += [packed_case(dtype, *shape) for dtype in DTYPES[:2] for shape in shapes]
    cases.append(packed_case("float32", 64, 6))
    # So many tokens, of short sequences or documents, that the first ones of each take the dense branches' kernels.
    cases += [MatrixCase("bfloat16", 64, heads, tokens=250, batch=132, check_last=True) for heads in (6, 5)]
    cases += [packed_case(DTYPES[i % 2], 64, heads, repeats=16) for i, heads in enumerate((6, 6, 1, 5, 16))]
    cases += [MatrixCase("bfloat16", 64, 6, tokens=100 * n, chosen=n) for n in (3, 8, 16, 32, 64)]
    # Long enough for queries that leave most of their choices to the pairs.
    cases += [
        MatrixCase("bfloat16", 64, 6, tokens=4800, chosen=16),
        MatrixCase("float16", 64, 3, tokens=1500, chosen=5),
        MatrixCase("bfloat16", 128, 16, tokens=1500, chosen=5),
        MatrixCase("bfloat16", 128, 16, tokens=4800, chosen=16),
    ]
    large = ((128, 16), (64, 32))
    cases += [MatrixCase("bfloat16", *shape, tokens=2001, batch=264, check_last=True) for shape in large]
    return sorted(cases, key=lambda case: -case.dim * (2 if case.dtype == "float32" else 1))  # slowest to compile first


def packed_case(dtype: str, dim: int, heads_per_group: int, repeats: int = 1) -> MatrixCase:
    return MatrixCase(dtype, dim, heads_per_group, tokens=repeats * sum(DOCUMENTS), packed=repeats)


def cases_of(dims: Sequence[int]) -> list[MatrixCase]:
    return [case for case in all_cases() if case.dim in dims]


def run_case(case: MatrixCase) -> dict[str, float]:
    """Relative RMSE of the output and of every gradient, and the share of other choices."""
    from tamis.attention import NSASpec, nsa_attention, reference, select_blocks
    from tamis.attention.agreement import random_inputs, relative_rmse

    spec = NSASpec(n_sel=case.chosen)
    dtype, heads = getattr(torch, case.dtype), case.groups * case.heads_per_group
    if case.check_last:
        inputs = large_inputs(case, dtype, spec.compressed_blocks(case.tokens))
    else:
        inputs = random_inputs("cuda", dtype, heads, case.groups, case.dim, spec, case.tokens, batch=case.batch)
    inputs[0] *= case.scale
    if case.signed_gates:
        inputs[-1] = torch.where(inputs[-1] < 0.4, 0.0, inputs[-1] - 0.6)
    offsets, longest = None, max(DOCUMENTS) if case.packed > 1 else None
    if case.packed:
        offsets = torch.tensor([0, *DOCUMENTS * case.packed, 0], device="cuda").cumsum(0, dtype=torch.int32)
    packed: dict = {"cu_seqlens": offsets, "max_seqlen": longest}
    dout = torch.randn(inputs[0].shape, dtype=dtype, device="cuda")
    got = with_gradients(lambda *x: nsa_attention(*x, spec, "triton", **packed), inputs, dout)
    if case.check_last:
        inputs, dout, got = [x[-1:] for x in inputs], dout[-1:], [x[-1:] for x in got]
    errors, ids = {}, None
    if case.scale > 1 or case.chosen != CHOSEN or case.packed > 1:
        # Of large logits, many blocks or very many tokens some scores are nearly equal, and rounding decides: the
        # reference takes the kernels' choice.
        ids = select_blocks(*inputs[:2], spec, "triton", **packed)
    if ids is not None and case.scale == 1:
        expected = reference.select_blocks(inputs[0].float(), inputs[1].float(), spec, cu_seqlens=offsets)
        errors["choices"] = float((ids != expected).float().mean())
    want = with_gradients(
        lambda *x: reference.nsa_attention(*x, spec, offsets, None, ids), [x.float() for x in inputs], dout.float()
    )
    return errors | {name: relative_rmse(x, y) for name, x, y in zip(NAMES, got, want, strict=True)}


def large_inputs(case: MatrixCase, dtype: torch.dtype, blocks: int) -> list[Tensor]:
    """Drawn on the GPU, which takes less time for many."""
    torch.manual_seed(0)
    heads = case.groups * case.heads_per_group
    keys = [(n, case.groups, case.dim) for n in (blocks,) * 2 + (case.tokens,) * 4]
    shapes = [(case.tokens, heads, case.dim), *keys, (case.tokens, heads, 3)]
    *tensors, gates = (torch.randn(case.batch, *shape, dtype=dtype, device="cuda") for shape in shapes)
    return [*tensors, gates.sigmoid()]


def with_gradients(attend, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def work(worker: int, workers: int, dims: Sequence[int]) -> None:
    """Run a share of the cases and print one line of JSON each. A CUDA error ends the process: the rest did not run."""
    for case in cases_of(dims)[worker::workers]:
        errors = run_case(case)
        torch.cuda.empty_cache()
        print(json.dumps({"case": asdict(case), "errors": errors}), flush=True)


def judge(rows: list[dict], dims: Sequence[int] = DIMS) -> tuple[list[str], dict[str, float]]:
    """The cases that failed or did not run, and the worst error of each dtype, large logits aside."""
    failed, worst = [], dict.fromkeys(DTYPES, 0.0)
    measured = {json.dumps(row["case"]): row["errors"] for row in rows}
    for case in cases_of(dims):
        errors = measured.get(json.dumps(asdict(case)))
        slack = SLACK_OF_LARGE_LOGITS if case.scale > 1 else 1.0
        bad = errors is None or {name: x for name, x in errors.items() if not x <= LIMIT[case.dtype] * slack}
        if bad:
            failed.append(f"{case}: {'not run' if errors is None else bad}")
        if errors and case.scale == 1:
            worst[case.dtype] = max(worst[case.dtype], *errors.values())
    return failed, worst


def run_matrix(seconds: float = 420, dims: Sequence[int] = DIMS) -> dict:
    """Start the workers, wait at most `seconds`, and return what they found."""
    began, workers = time.monotonic(), os.cpu_count() or 1
    command = [sys.executable, "-m", "tests.gpu.matrix", *(f"--dim={dim}" for dim in dims), f"--workers={workers}"]
    started = [
        subprocess.Popen([*command, f"--worker={i}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(workers)
    ]
    rows, complaints = [], []
    for process in started:
        try:
            output, complaint = process.communicate(timeout=max(1.0, began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, complaint = process.communicate()
        rows += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        complaints += complaint.strip().splitlines()[-1:] if process.returncode else []
    failed, worst = judge(rows, dims)
    found = {"cases": len(cases_of(dims)), "failed": failed, "worst": worst, "complaints": sorted(set(complaints))}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every accepted combination against the reference on a GPU.")
    parser.add_argument("--dim", type=int, action="append", choices=DIMS, help="only this head dim; repeatable")
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    dims = tuple(given.dim or DIMS)
    if given.worker is not None:
        work(given.worker, given.workers, dims)
        return 0
    found = run_matrix(dims=dims)
    for dtype, error in found["worst"].items():
        print(f"{dtype:9} worst relative RMSE {error:.1e} (limit {LIMIT[dtype]:.0e})")
    print("\n".join(found["failed"]) or f"all {found['cases']} cases agree")
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
