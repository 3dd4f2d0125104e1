"""Kernels that other processes compile while a worker starts: which ones, and that nothing depends on them."""

import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime.interpreter import InterpretedFunction

from tamis.attention.kernels import ahead_of_time
from tamis.run.files import hardware
from tamis.run.files.hardware import Gpu, read_capability
from tamis.train.tools import early_compile
from tests.train.processes import tiny_config

ATTENTION = {
    "_forward_kernel",
    "_dq_kernel",
    "_dkv_kernel",
    "_score_kernel",
    "_top_kernel",
    "backward_items",
    "_mix_kernel",
}
LAYERS = {"_norm_kernel", "_norm_backward_kernel", "_split_kernel", "_join_kernel", "_cross_entropy_kernel"}


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_compile, "_started", None)


@pytest.mark.parametrize(("packing", "tables"), [("stream", False), ("documents", True)])
def test_the_kernels_of_the_proof_and_of_step_1_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, tables: bool
) -> None:
    launched: set[str] = set()
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: lambda *a, **k: launched.add(self.fn.__name__)
    )
    config = tiny_config(tmp_path, f"data.packing={packing}", "model.attention=nsa", "train.seq_len=512")
    early_compile.launch_kernels(config)
    assert launched >= ATTENTION | LAYERS
    assert ("_write_tables" in launched) is tables


def test_a_process_is_started_only_by_the_first_worker_of_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_compile, "LEAST_CORES", 1)
    monkeypatch.setattr(early_compile, "GPU_DRIVER", tmp_path / "none")
    early_compile.start_compiling([])
    monkeypatch.setattr(early_compile, "GPU_DRIVER", tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    early_compile.start_compiling([])
    assert not early_compile.is_compiling()
    monkeypatch.delenv("LOCAL_RANK")
    (tmp_path / "config.yaml").write_text(tiny_config(tmp_path).to_yaml())
    early_compile.start_compiling(["--config", str(tmp_path / "config.yaml"), "--resume", "auto"])
    assert early_compile._started is not None
    early_compile.wait_until_compiled()
    assert early_compile._started.returncode == 0  # without a GPU there is nothing to compile


def test_what_is_compiled_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware, "read_gpus", lambda: [Gpu(0, "NVIDIA H200", 1, 1, 0, "")])
    monkeypatch.setattr(hardware, "read_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(ahead_of_time, "compile_in_processes", lambda gpu, *_: compiled.append(gpu) or True)
    (tmp_path / "config.yaml").write_text(tiny_config(tmp_path).to_yaml())
    for override in ("train.steps=1", "train.steps=2", "train.seq_len=1024"):
        monkeypatch.setattr(sys, "argv", ["early_compile", "--config", str(tmp_path / "config.yaml"), override])
        assert early_compile.main() == 0
    assert len(compiled) == 2  # steps change no kernel, the length does
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert early_compile.marker_of(tiny_config(tmp_path), "NVIDIA H200") is None


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(early_compile, "_started", sleeping)
    monkeypatch.setattr(early_compile, "PATIENCE_S", 0.05)
    early_compile.wait_until_compiled()
    assert sleeping.returncode is not None
    assert not early_compile.is_compiling()


def test_the_capability_comes_from_the_driver() -> None:
    class Nvml:
        nvmlInit = nvmlShutdown = staticmethod(lambda: None)
        nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
        nvmlDeviceGetCudaComputeCapability = staticmethod(lambda handle: [8, handle])

    assert read_capability(Gpu(9, "NVIDIA L40S", 1, 1, 0, ""), Nvml) == (8, 9)
