"""A machine whose GPUs torch cannot use does not train on the CPU by mistake."""

import pytest
import torch

from tamis.config import ConfigError
from tamis.train import main
from tests.faults.launched import tiny_config
from tests.run.fabricate import GPUS
from tests.train import processes


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPUs")
def test_gpus_that_nvml_lists_and_torch_cannot_use_refuse_the_start(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(main, "read_gpus", lambda: GPUS)
    with pytest.raises(ConfigError, match=r"2 × .*\(driver .*cannot use them.*runtime\.device=cpu"):
        main.train_config(tiny_config(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_context_that_cannot_be_created_early_is_left_to_the_message_that_follows(tmp_path) -> None:
    config = processes.tiny_config(tmp_path, "runtime.device=cuda")
    main._create_context(config)
    with pytest.raises(ConfigError, match=r"runtime\.device is cuda, but no usable GPU was found"):
        main.train_config(config)
