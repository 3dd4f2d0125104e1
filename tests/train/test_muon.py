"""Muon: equal to PyTorch's, part by part, skipped on the device, and exact under resume, on two ranks and in shards."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tamis.checkpoint.file import read_checkpoint
from tamis.config import Config, Train
from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tamis.train import main
from tamis.train.optimizer import Muon, OptimizerStep, learning_rate, muon_matrices, orthogonalised
from tests.train.processes import run_ranks, tiny_config, train_rank

CPU = torch.device("cpu")
SPEEDRUN = ["train.recipe=speedrun", "train.batch_tokens=null", "train.warmup_steps=2", "model.attention=dense"]


def matrices(*shapes: tuple[int, int]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]


def test_whole_matrices_take_the_steps_of_pytorchs_muon() -> None:
    shapes = [(24, 16), (16, 24), (24, 16), (8, 8)]
    ours, theirs = matrices(*shapes), matrices(*shapes)
    muon = Muon(ours, [[len(p)] for p in ours], lr=0.02, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, 0.02, 0.1, 0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            other.grad = mine.grad.clone()
        muon.step()
        reference.step()
    for mine, other, start in zip(ours, theirs, matrices(*shapes), strict=True):
        assert (mine - start).abs().mean() > 0.01
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-3)  # both directions are computed in bfloat16


def test_the_parts_of_a_merged_matrix_are_made_orthogonal_alone() -> None:
    whole = matrices((24, 16))[0].detach()
    merged = orthogonalised([whole], [[8, 12, 4]])[0]
    alone = [orthogonalised([part], [[len(part)]])[0] for part in whole.split([8, 12, 4])]
    torch.testing.assert_close(merged, torch.cat(alone))
    singular = torch.linalg.svdvals(merged[:8]) / (0.2 * 16**0.5)
    assert (singular > 0.6).all() and (singular < 1.3).all()


def test_a_flag_on_the_device_skips_the_step_bit_for_bit() -> None:
    (parameter,) = matrices((6, 5))
    muon = Muon([parameter], [[6]], lr=0.1, momentum=0.9, weight_decay=0.1)
    parameter.grad = torch.ones(6, 5)
    muon.step()
    weight, buffer = parameter.detach().clone(), muon.state[parameter]["momentum_buffer"].clone()
    parameter.grad = torch.full((6, 5), math.nan)
    muon.found_inf = torch.ones(())
    muon.step()
    assert torch.equal(parameter, weight) and torch.equal(muon.state[parameter]["momentum_buffer"], buffer)


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SPEEDRUN, "model.attention=nsa")
    model = Decoder(config)
    found = muon_matrices(model, config)
    assert found["blocks.0.attention.project.weight"] == [16, *[8] * 6]
    assert found["blocks.1.feed_forward.gate_and_up.weight"] == [32, 32]
    kinds = {name.split(".", 2)[2] for name in found}
    assert kinds == {
        *("attention.project.weight", "attention.out.weight"),
        *("feed_forward.gate_and_up.weight", "feed_forward.down.weight"),
    }
    step = OptimizerStep(model, config, CPU)
    of_adamw = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    assert {id(p) for name, p in model.named_parameters() if name not in found} == of_adamw
    step._set_learning_rate(2)
    assert step.muon is not None and step.muon.param_groups[0]["lr"] == pytest.approx(4e-3)
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(2e-3)


def test_the_trapezoid_warms_up_stays_and_falls_in_a_line() -> None:
    train = Train(steps=100, warmup_steps=10, lr=1.0, lr_min_ratio=0.1, schedule="trapezoid", decay_fraction=0.4)
    rates = {step: learning_rate(step, train) for step in (5, 10, 11, 60, 80, 100, 101)}
    assert rates == pytest.approx({5: 0.5, 10: 1.0, 11: 1.0, 60: 1.0, 80: 0.55, 100: 0.1, 101: 0.1})


def tensors(config: Config, step: int) -> dict[str, Tensor]:
    from tamis.checkpoint.sharded import flatten  # here, because every test process loads this file

    return flatten(read_checkpoint(RunDirectory(config.train.out_dir).checkpoint(step), CPU))


def test_a_resumed_run_is_bit_identical_and_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    def config(name: str, *overrides: str) -> Config:
        steps = ["train.steps=4", "train.save_every=2", "train.batch_size=4"]
        return tiny_config(tmp_path / name, *SPEEDRUN, *steps, *overrides)

    whole = config("whole")
    assert main.train_config(whole, None) == 0
    run, saved = RunDirectory(whole.train.out_dir), tensors(whole, 4)
    assert "optimizer.blocks.0.attention.out.weight.momentum_buffer" in saved
    facts = read_checkpoint(run.checkpoint(4), CPU)["config"]["train"]
    assert (facts["recipe"], facts["optimizer"]) == ("speedrun", "muon")
    assert main.train_config(whole, str(run.checkpoint(2))) == 0
    again = tensors(whole, 4)
    assert [name for name in saved if not torch.equal(saved[name], again[name])] == []

    for parallel in ("ddp", "fsdp"):  # the same global batch, half of it on each rank
        of_two = config(parallel, f"runtime.parallel={parallel}", "train.batch_size=2")
        run_ranks(tmp_path / "logs" / parallel, 2, train_rank, of_two, str(run.checkpoint(2)))
        for name, tensor in tensors(of_two, 4).items():
            torch.testing.assert_close(tensor, saved[name], rtol=1e-3, atol=1e-5, msg=f"{parallel}: {name}")
