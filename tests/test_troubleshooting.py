"""Each symptom of docs/troubleshooting.md, provoked: what the operator sees names the cause and what to change."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tamis.config import Config, load_config
from tamis.run.files.directory import RunDirectory
from tamis.train import settings
from tamis.train.main import train_config
from tamis.train.memory import out_of_memory_advice
from tests.checkout import MINIATURE, ROOT

CPU = torch.device("cpu")
DOCUMENT = (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.fixture(autouse=True)
def defaults_afterwards() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def config_of(out: Path, *overrides: str) -> Config:
    keys = [*MINIATURE, "train.steps=2", "train.log_every=1", f"train.out_dir={out}", *overrides]
    return load_config(ROOT / "configs" / "train_showcase.yaml", keys)


def written(document: str) -> str:
    """As one line, so that a sentence may be broken anywhere."""
    return re.sub(r"\s+", " ", document)


def test_out_of_memory_names_the_keys_and_keeps_the_tokens_per_step(tmp_path, monkeypatch, capsys) -> None:
    def runs_out(self, loss) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("tamis.train.optimizer.OptimizerStep.backward", runs_out)
    assert train_config(config_of(tmp_path, "train.batch_size=4", "train.accumulate_grad_batches=3")) == 1
    printed = capsys.readouterr().err
    assert "out of GPU memory" in printed
    assert "train.batch_size=2 train.accumulate_grad_batches=6 (the same tokens per step)" in printed
    assert "runtime.gradient_checkpointing=true" in printed
    assert list(tmp_path.glob("mem_out_of_memory_step1.*"))


@pytest.mark.parametrize(("batch", "accumulate"), [(1, 1), (2, 1), (3, 2), (12, 1)])
def test_the_advice_on_memory_is_a_configuration_with_the_same_tokens(tmp_path, batch: int, accumulate: int) -> None:
    config = config_of(tmp_path, f"train.batch_size={batch}", f"train.accumulate_grad_batches={accumulate}")
    keys = re.findall(r"train\.(?:batch_size|accumulate_grad_batches)=\d+", out_of_memory_advice(config, CPU))
    advised = config_of(tmp_path, *keys) if keys else config
    assert advised.tokens_per_step(1) == config.tokens_per_step(1)
    assert advised.train.batch_size < batch or batch == 1


def test_data_that_does_not_come_is_reported_with_its_remedy(tmp_path, capsys) -> None:
    slow = ["data.dataset=fineweb_edu", f"data.hub_name={ROOT / 'tamis/data/assets/sample'}"]
    assert train_config(config_of(tmp_path, *slow, "data.loader_timeout_s=0.0001")) == 6
    printed = capsys.readouterr().err
    assert "did not come within 0.0001 s" in printed
    assert "data.loader_timeout_s (--loader-timeout)" in printed


def test_a_low_learning_rate_at_the_start_is_explained_by_the_first_lines(tmp_path, capsys) -> None:
    train_config(config_of(tmp_path, "train.lr=2e-4", "train.warmup_steps=2000"))
    printed = capsys.readouterr().out
    assert "lr 0.0002 after 2,000 warm-up steps" in printed
    assert "| lr 1.00e-07 |" in printed


def test_long_documents_give_no_warning(tmp_path, capfd) -> None:
    from tamis.data import open_loader

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = open_loader(config_of(tmp_path, "data.tokenizer=gpt2", "data.dataset=sample"))
        assert loader.next().tokens.shape == (1, 2, 33)
        loader.close()
    assert "longer than" not in "".join(capfd.readouterr())


def test_memory_snapshots_come_before_and_after_the_chosen_steps(tmp_path) -> None:
    assert train_config(config_of(tmp_path, "train.steps=4", "runtime.mem_dump_every=2")) == 0
    names = sorted(path.name for path in tmp_path.glob("mem_*"))
    assert names == [f"mem_{moment}_step{n}.rank0.json" for moment in ("post", "pre") for n in (2, 4)]
    figures = json.loads(RunDirectory(tmp_path).memory_dump("post", 4, "rank0.json").read_text())
    assert figures["host_peak_bytes"] > 10 << 20


def test_the_audit_of_attention_kernels_lists_what_is_allowed(tmp_path) -> None:
    def audit(*overrides: str) -> str:
        return "\n".join(settings.sdpa_audit(config_of(tmp_path, *overrides), CPU))

    assert "NSA layers use none of PyTorch's attention kernels" in audit()
    assert "flash attention is allowed" in audit("model.attention=dense")
    assert "cuDNN attention is allowed" in audit()
    assert "cuDNN attention is not allowed" in audit("runtime.deterministic=true")
    assert "flash attention is not allowed" in audit("runtime.sdpa=no_flash")
    assert "math attention is not allowed" in audit("runtime.sdpa=flash_only")


def test_deterministic_turns_on_pytorchs_own_setting(tmp_path, capsys) -> None:
    train_config(config_of(tmp_path, "runtime.deterministic=true"))
    assert torch.are_deterministic_algorithms_enabled()
    assert "the same inputs give the same bits" in capsys.readouterr().out


def test_production_does_not_fall_back_to_the_processor(tmp_path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"runtime\.production is true and no usable GPU was found"):
        train_config(config_of(tmp_path, "runtime.production=true", "runtime.device=auto"))
    assert not list(tmp_path.iterdir())


def test_ranges_are_balanced_even_when_a_step_fails(tmp_path, monkeypatch) -> None:
    """Each name that is opened is closed, whatever happens inside."""
    open_now: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            open_now.append(self.name)

        def __exit__(self, *error: object) -> None:
            assert open_now.pop() == self.name

    def fails(self, loss) -> None:
        assert open_now == ["backward"]
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch.profiler, "record_function", Range)
    monkeypatch.setattr("tamis.train.optimizer.OptimizerStep.backward", fails)
    assert train_config(config_of(tmp_path)) == 1
    assert open_now == []


def test_the_document_quotes_messages_as_they_are_printed(tmp_path) -> None:
    for sentence in [
        "out of GPU memory",
        "did not come within",
        "warm-up steps",
        "no event files in",
        "runtime.production is true and no usable GPU was found",
    ]:
        assert sentence in written(DOCUMENT), sentence
