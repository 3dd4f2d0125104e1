"""Both kinds of checkpoint become each other and plain weights, without changing a bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tamis.checkpoint.convert import Kind, convert_checkpoint
from tamis.checkpoint.file import read_checkpoint
from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import DamagedCheckpoint, damage
from tests.train.processes import run_ranks, tiny_config, train_rank

CPU = torch.device("cpu")
OTHER: dict[Kind, Kind] = {"file": "folder", "folder": "file"}


def config_of(out: Path, parallel: str, steps: int = 2) -> Config:
    return tiny_config(out, f"train.steps={steps}", "train.warmup_steps=1", f"runtime.parallel={parallel}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """A file that DDP wrote, and a folder that FSDP wrote."""
    folder = tmp_path_factory.mktemp("written")
    for parallel in ("ddp", "fsdp"):
        run_ranks(folder / f"logs_{parallel}", 2, train_rank, config_of(folder / parallel, parallel))
    written = {kind: RunDirectory(folder / name).checkpoint(2) for kind, name in [("file", "ddp"), ("folder", "fsdp")]}
    assert written["file"].is_file() and written["folder"].is_dir()
    return written  # type: ignore[return-value]


def assert_same_state(a: Path, b: Path) -> None:
    from tamis.checkpoint.sharded import TENSORS, flatten  # here, because every test process loads this file

    one, other = read_checkpoint(a, CPU), read_checkpoint(b, CPU)
    assert {name: one[name] for name in one if name not in TENSORS} == {
        name: other[name] for name in other if name not in TENSORS
    }
    tensors = flatten(one), flatten(other)
    assert tensors[0].keys() == tensors[1].keys() and len(tensors[0]) > 50
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_checkpoint_is_unchanged_after_conversion_both_ways(
    tmp_path: Path, checkpoints: dict[Kind, Path], kind: Kind
) -> None:
    there = convert_checkpoint(checkpoints[kind], tmp_path / "there" / "checkpoint_step2.pt", OTHER[kind])
    back = convert_checkpoint(there, tmp_path / "back" / "checkpoint_step2.pt", kind)
    assert there.is_dir() == (OTHER[kind] == "folder") and back.is_dir() == (kind == "folder")
    assert damage(there.with_suffix(".json")) is None and damage(back.with_suffix(".json")) is None
    assert_same_state(checkpoints[kind], there)
    assert_same_state(checkpoints[kind], back)


@pytest.mark.parametrize(("kind", "parallel", "world_size"), [("file", "fsdp", 4), ("folder", "ddp", 2)])
def test_a_run_resumes_from_the_other_kind_with_the_same_loss(
    tmp_path: Path, checkpoints: dict[Kind, Path], kind: Kind, parallel: str, world_size: int
) -> None:
    """Each kind is loaded as it is by the other way of training, and on another number of processes."""
    config = config_of(tmp_path / "run", parallel, steps=4)
    batch = config.train.model_copy(update={"batch_size": 4 // world_size})
    config = config.model_copy(update={"train": batch})
    run_ranks(tmp_path / "logs", world_size, train_rank, config, str(checkpoints[kind]))
    alone = config_of(tmp_path / "alone", "ddp", steps=4)
    alone = alone.model_copy(update={"train": alone.train.model_copy(update={"batch_size": 4})})
    run_ranks(tmp_path / "alone_logs", 1, train_rank, alone, str(checkpoints[kind]))
    moved, expected = (
        [[float(x) for x in row.split(",")[:2]] for row in (path / "training.csv").read_text().splitlines()[1:]]
        for path in (tmp_path / "run", tmp_path / "alone")
    )
    assert [row[0] for row in moved] == [3, 4]
    assert moved == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_exported_weights_equal_the_checkpoint_and_carry_its_configuration(
    tmp_path: Path, checkpoints: dict[Kind, Path], kind: Kind
) -> None:
    target = convert_checkpoint(checkpoints[kind], tmp_path / "model.safetensors", "safetensors")
    state, weights = read_checkpoint(checkpoints[kind], CPU), load_file(target)
    assert weights.keys() == state["model"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in state["model"].items())
    with safe_open(target, "pt") as file:
        about = file.metadata()
    assert json.loads(about["tamis_config"]) == state["config"] and about["tamis_step"] == "2"


def test_an_impossible_conversion_is_refused_with_the_reason(tmp_path: Path, checkpoints: dict[Kind, Path]) -> None:
    source = checkpoints["file"]
    with pytest.raises(ValueError, match="must be one of file, folder, safetensors"):
        convert_checkpoint(source, tmp_path / "x", "zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be named checkpoint_step2\.pt"):
        convert_checkpoint(source, tmp_path / "model.pt", "folder")
    with pytest.raises(ValueError, match="is there already"):
        convert_checkpoint(source, source, "folder")
    with pytest.raises(DamagedCheckpoint, match="there is no such file"):
        convert_checkpoint(source.with_name("checkpoint_step9.pt"), tmp_path / "x", "safetensors")
    assert not list(tmp_path.iterdir())
