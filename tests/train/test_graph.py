"""When a micro-batch is replayed as a CUDA graph."""

from pathlib import Path

import pytest
import torch

from tamis.train.distributed import Ranks
from tamis.train.step import replays_graph
from tests.train.processes import tiny_config


@pytest.mark.parametrize(
    ("overrides", "world_size", "device", "expected"),
    [
        ((), 1, "cuda", True),
        ((), 1, "cpu", False),
        ((), 2, "cuda", False),
        (("runtime.nvtx=true",), 1, "cuda", False),
        (("runtime.cuda_graph=false",), 1, "cuda", False),
        (("train.batch_size=64", "train.seq_len=2048"), 1, "cuda", True),
        (("train.batch_size=1", "train.seq_len=262144"), 1, "cuda", False),
    ],
)
def test_only_small_micro_batches_of_one_gpu_are_a_graph(
    tmp_path: Path, overrides: tuple[str, ...], world_size: int, device: str, expected: bool
) -> None:
    ranks = Ranks(0, world_size, torch.device(device))
    assert replays_graph(tiny_config(tmp_path, *overrides), ranks) is expected
