"""Two ranks that share one GPU train together, over gloo: NCCL refuses that, and trying things out needs it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = ["model.dim=128", "model.n_layers=2", "model.n_heads=4", "model.d_k=32", "model.d_ff=128", "train.seq_len=256"]


def test_two_ranks_on_one_gpu_train_and_agree(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    keys = ["data.dataset=synthetic", "runtime.device=cuda", "runtime.compile=false", "runtime.weight_check_every=2"]
    keys += ["train.steps=4", "train.batch_size=2", "train.eval_every=0", f"train.out_dir={tmp_path}"]
    command = [*torchrun, "-m", "tamis.train.main", *SMALL, *keys]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    run = RunDirectory(tmp_path)
    assert [read_heartbeats(run.heartbeat(rank))[-1].phase for rank in (0, 1)] == ["done", "done"]
    assert run.checkpoints() == [4]
