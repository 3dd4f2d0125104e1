"""A machine whose GPUs torch cannot use does not train on the CPU by mistake."""

import pytest
import torch

from tamis.config import ConfigError
from tamis.train import main
from tests.faults.launched import tiny_config
from tests.run.fabricate import GPUS


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPUs")
def test_gpus_that_nvml_lists_and_torch_cannot_use_refuse_the_start(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(main, "read_gpus", lambda: GPUS)
    with pytest.raises(ConfigError, match=r"2 × .*\(driver .*cannot use them.*runtime\.device=cpu"):
        main.train_config(tiny_config(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
