"""The matrix of accepted shapes: its design on any machine, its cases on a GPU."""

from dataclasses import asdict

import pytest
import torch

from tests.gpu.matrix import DIMS, DTYPES, HEADS_PER_GROUP, all_cases, cases_of, judge, run_matrix


def test_the_matrix_meets_every_dim_in_every_dtype_and_every_group_size() -> None:
    cases = all_cases()
    assert {(case.dtype, case.dim) for case in cases} == {(dtype, dim) for dtype in DTYPES for dim in DIMS}
    assert {case.heads_per_group for case in cases if case.dtype == "bfloat16"} >= set(HEADS_PER_GROUP)
    assert len(set(cases)) == len(cases)
    elements = [case.batch * case.tokens * case.groups * case.heads_per_group * case.dim for case in cases]
    assert sum(count > 2**31 for count in elements) >= 2


def test_some_head_dims_can_run_alone() -> None:
    assert {case.dim for case in cases_of((64, 128))} == {64, 128}
    failed, _ = judge([], dims=(64,))
    assert len(failed) == len(cases_of((64,))) and all("dim=64" in line for line in failed)


def test_a_case_that_did_not_run_or_is_wrong_in_one_gradient_fails() -> None:
    right, wrong, *missing = all_cases()
    rows = [
        {"case": asdict(right), "errors": {"out": 1e-6, "dq": 1e-6}},
        {"case": asdict(wrong), "errors": {"out": 1e-6, "dq": float("nan")}},
    ]
    failed, _ = judge(rows)
    assert len(failed) == 1 + len(missing)
    assert "'dq': nan" in failed[0] and failed[1].endswith("not run")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(440)
def test_every_accepted_combination_agrees_with_the_reference() -> None:
    assert run_matrix()["failed"] == []
